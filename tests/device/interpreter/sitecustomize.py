"""Gives an interpreter the simulated devices; Python imports it at its start where this folder is in ``PYTHONPATH``.

For processes that no test forks: torchrun's workers, and the script that a replay starts.
"""

import sys

SERVERS = ("resource_tracker", "forkserver")  # of multiprocessing, which compute nothing

if not any(f"multiprocessing.{name} import" in argument for name in SERVERS for argument in sys.orig_argv):
    from tests.device import staged

    staged.register()
