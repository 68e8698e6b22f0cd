"""`ddp-nanguard doctor`: what stands in the way of the guard, in one process; with ranks in tests/ranks."""

import json
import socket
import sys

import pytest

from ddp_nanguard.cli.main import main


def doctor(capsys, *arguments):
    code = main(["doctor", *map(str, arguments)])
    return code, capsys.readouterr().out


def checks(capsys, *arguments):
    code, out = doctor(capsys, "--json", *arguments)
    data = json.loads(out)
    assert data["holds"] == (code == 0)
    return code, {check["promise"]: (check["holds"], check["detail"]) for check in data["checks"]}


def failed(found):
    return {name: detail for name, (holds, detail) in found.items() if holds is False}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TORCH_NCCL_NAN_CHECK"):
        monkeypatch.delenv(name, raising=False)


def test_a_machine_that_has_all_passes_and_nothing_stays_behind(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("guard = NanGuard(model, optimizer)\n# assert not torch.isnan(loss)\n")
    wanted = tmp_path / "not" / "yet"
    code, found = checks(capsys, "--dump-dir", wanted, "--", sys.executable, script)
    assert (code, failed(found)) == (0, {})
    assert found["script"] == (True, "no NaN check of its own")
    assert found["dump_dir"][1].startswith(f"{wanted}: can be written, ") and list(tmp_path.iterdir()) == [script]
    code, out = doctor(capsys, "--dump-dir", tmp_path)
    assert code == 0 and out.splitlines()[-1] == "doctor: nothing stands in the way"


@pytest.mark.parametrize(
    ("name", "text", "promise", "said"),
    [
        ("TORCH_NCCL_NAN_CHECK", "1", "other NaN checks", "before the guard can ask the others; unset it"),
        ("NCCL_SOCKET_IFNAME", "eth7", "network interfaces", "NCCL_SOCKET_IFNAME=eth7 is; set both"),
        ("NANGUARD_HISTORY", "many", "NANGUARD_ variables", "NANGUARD_HISTORY='many' does not fit; valid: a whole"),
        ("NANGUARD_ENABLED", "0", "NANGUARD_ variables", "NANGUARD_ENABLED=0: the guard is switched off"),
        ("NANGUARD_DUMP_DIR", f"{__file__}/x", "dump_dir", f"Not a directory in {__file__}; set dump_dir="),
    ],
)
def test_what_the_environment_breaks_is_named_with_its_remedy(name, text, promise, said, capsys, monkeypatch):
    monkeypatch.setenv(name, text)
    code, found = checks(capsys)
    assert code == 1 and set(failed(found)) == {promise} and said in failed(found)[promise]
    assert doctor(capsys)[1].splitlines()[-1] == f"doctor: FAILED: {promise}"


def test_gloo_on_an_interface_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonsense")
    code, found = checks(capsys)
    assert code == 1 and set(failed(found)) == {"gloo", "network interfaces"}
    assert all(name in found["network interfaces"][1] for _, name in socket.if_nameindex())
    assert "set GLOO_SOCKET_IFNAME to a network interface of this machine" in found["gloo"][1]


def test_checks_of_the_script_that_raise_before_the_guard_are_shown(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("torch.autograd.set_detect_anomaly(True)\nx = 1\nassert torch.isfinite(loss)\n")
    _, found = checks(capsys, "--", sys.executable, script)
    holds, said = found["script"]
    assert holds is None and said == (
        "no NanGuard in this file; may raise first, on one rank: "
        "train.py:1: torch.autograd.set_detect_anomaly(True); train.py:3: assert torch.isfinite(loss)"
    )


def test_an_interpreter_without_the_package_is_named(tmp_path, capsys):
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\" >&2\nexit 1\n")
    interpreter.chmod(0o755)
    (tmp_path / "torchrun").symlink_to("/bin/sh")
    for command in ("python", "torchrun"):
        code, found = checks(capsys, "--", tmp_path / command)
        expected = f"{interpreter}: ModuleNotFoundError: No module named 'torch'; install ddp-nanguard there"
        assert code == 1 and failed(found) == {"interpreter of the job": expected}


@pytest.mark.parametrize(
    ("command", "promise", "said"),
    [
        (["no-such-command", "x"], "command", "there is no command 'no-such-command'; give what starts the job"),
        ([sys.executable, "/no/such/train.py"], "script", "No such file or directory; give its path as from here"),
    ],
)
def test_a_command_that_cannot_be_run(command, promise, said, capsys):
    code, found = checks(capsys, "--", *command)
    assert code == 1 and said in failed(found)[promise]
