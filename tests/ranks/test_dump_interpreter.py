"""The dump in an interpreter of its own: reading executes nothing, files at its end are written without threads."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ddp_nanguard.dump import thread_map as threads
from ddp_nanguard.dump import write_dump
from tests.dump_requests import request


@pytest.fixture
def path(tmp_path):
    """A whole dump of one rank."""
    result = write_dump(request(tmp_path))
    assert result.problems == []
    return Path(result.path)


def test_reading_executes_nothing(path):
    """In a fresh process, with every way to unpickle closed and no further module of the user at hand."""
    code = textwrap.dedent(
        """
        import pickle, sys, torch
        from ddp_nanguard.dump import open_dump
        def refuse(*_args, **_kwargs):
            raise AssertionError("unpickled")
        pickle.load = pickle.loads = pickle.Unpickler = pickle._Unpickler = refuse
        torch.load = torch.serialization.load = refuse
        before = set(sys.modules)
        dump = open_dump(sys.argv[1])
        dump.load_state(rank=0), dump.window(0), dump.buffers(0), dump.history(0), dump.plain_state(), dump.evidence(0)
        print(sorted(name for name in set(sys.modules) - before if name.split(".")[0] in ("train", "tests")))
        """
    )
    run = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "[]\n"), run.stderr


def test_at_the_end_of_the_interpreter_it_goes_on_without_threads() -> None:
    code = f"""
import atexit, importlib.util
spec = importlib.util.spec_from_file_location("threads", {threads.__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.thread_map(str, [0])
atexit.register(lambda: print(module.thread_map(str, range(9))))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=True)
    assert ended.stdout.strip() == str([str(index) for index in range(9)])
