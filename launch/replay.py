"""Replays a dump on as many ranks as it was recorded with.

Usage, on the machine or the nodes where the dump lies:

    torchrun --nproc-per-node N launch/replay.py DUMP

Every rank takes its own window and random state; rank 0 prints the outcome as one JSON line, and with ``--trace`` the
trace of the rank where the value was made. The same as
``torchrun --nproc-per-node N -m ddp_nanguard.cli.replay_ranks DUMP``. The culprit alone, without torchrun:
``ddp-nanguard replay DUMP``.
"""

from __future__ import annotations

import runpy

if __name__ == "__main__":
    runpy.run_module("ddp_nanguard.cli.replay_ranks", run_name="__main__", alter_sys=True)
