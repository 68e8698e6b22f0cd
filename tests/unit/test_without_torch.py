"""What the command line and the package do without torch, which takes seconds to import."""

import json
import subprocess
import sys

import pytest

from ddp_nanguard.dump.records import SCHEMA_VERSION

WITHOUT_TORCH = """
import sys


class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy", "safetensors", "jinja2", "plotly", "matplotlib"):
            raise RuntimeError(f"{name} was imported")


sys.meta_path.insert(0, Refuses())
"""
MAIN = WITHOUT_TORCH + "from ddp_nanguard.cli.main import run\nrun()\n"


def run_without_torch(code, *arguments):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)


def test_reading_what_a_run_has_left_imports_no_torch(path):
    listing = run_without_torch(MAIN, "list", path.parent)
    assert (listing.returncode, listing.stderr) == (0, "") and "layers.2.act (call 1)" in listing.stdout
    shown = run_without_torch(MAIN, "show", path)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.splitlines()[0] == "rank 0, step 7, micro-batch 1, forward"
    as_json = run_without_torch(MAIN, "show", "--json", path)
    assert json.loads(as_json.stdout)["schema_version"] == SCHEMA_VERSION and as_json.stderr == ""


@pytest.mark.parametrize("command", [[], ["list"], ["replay"], ["drill"], ["report"], ["run"]])
def test_help_imports_no_torch(command):
    ended = run_without_torch(MAIN, *command, "--help")
    assert (ended.returncode, ended.stderr) == (0, "") and "usage: ddp-nanguard" in ended.stdout


def test_the_package_imports_torch_with_the_first_name_that_needs_it():
    code = WITHOUT_TORCH + (
        "import ddp_nanguard\n"
        "from ddp_nanguard import DumpError, GuardConfig, NonFiniteError, Phase\n"
        "assert set(ddp_nanguard.__all__) <= set(dir(ddp_nanguard))\n"
        "assert ddp_nanguard.config.GuardConfig is GuardConfig\n"
        "try:\n    ddp_nanguard.NoSuchName\n"
        "except AttributeError as error:\n    print(error)\n"
        "from ddp_nanguard import NanGuard\n"
    )
    ended = run_without_torch(code)
    assert ended.stdout == "module 'ddp_nanguard' has no attribute 'NoSuchName'\n"
    assert ended.returncode == 1 and ended.stderr.splitlines()[-1] == "RuntimeError: torch was imported"


def test_every_exported_name_is_the_one_that_its_module_defines():
    import ddp_nanguard
    from ddp_nanguard import dump

    for package in (ddp_nanguard, dump):
        assert set(package._WHERE) == set(package.__all__)
        for name in package.__all__:
            defined = getattr(package, name)
            assert defined.__module__ == f"{package.__name__}.{package._WHERE[name]}"
