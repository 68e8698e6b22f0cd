"""The same fault in several dumps: what makes two faults the same one, and what is said of their steps and hosts."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from ddp_nanguard.cli.table import incident_lines
from ddp_nanguard.dump import list_dumps, write_dump
from ddp_nanguard.dump.incidents import incidents
from ddp_nanguard.dump.manifest import settings
from ddp_nanguard.dump.rank_records import Device, RankEvidence
from ddp_nanguard.report.fingerprint import fingerprint
from ddp_nanguard.report.types import FaultReport, FirstOperator, InlineCode, Phase, SecondLook
from tests.dump_requests import report, request, site


def fault(**changes):
    return dataclasses.replace(report(), origin=dataclasses.replace(site(), **changes))


@pytest.mark.parametrize("change", [{"rank": 5}, {"rank": None}, {"step": 9}, {"micro_batch": 0}, {"call": 2}])
def test_the_same_fault_elsewhere_has_the_same_fingerprint(change):
    assert fingerprint(fault(**change)) == fingerprint(report()) != ""


@pytest.mark.parametrize(
    "change",
    [
        {"phase": Phase.BACKWARD},
        {"layer": "layers.3.act"},
        {"layer": None},
        {"slot": "input"},
        {"kind": "inf"},
        {"inline_code": InlineCode(None, "layers.1", "layers.2")},
        {"suspects": ("layers.1",)},
    ],
)
def test_another_fault_has_another_fingerprint(change):
    assert fingerprint(fault(**change)) != fingerprint(report())


def looked(origin, code):
    look = SecondLook("same", "same", FirstOperator(1, "aten.div.Tensor", "train.py:3 in step", code))
    return dataclasses.replace(fault(**origin), second_look=look)


def test_without_a_layer_the_statement_tells_faults_apart():
    loss = {"phase": Phase.LOSS, "layer": None, "slot": "loss"}
    assert fingerprint(looked(loss, "a / b")) == fingerprint(looked({**loss, "rank": 5}, "a / b"))
    assert fingerprint(looked(loss, "a / b")) != fingerprint(looked(loss, "c / d"))
    assert fingerprint(looked({}, "a / b")) == fingerprint(looked({}, "c / d"))  # a layer has a name of its own


def test_a_fault_without_an_origin_is_the_same_as_no_other():
    assert fingerprint(FaultReport(3, 1, "ddp", None)) == ""


def dumped(root, step, hosts=("host",), origin_rank=0, run_id="", **options):
    """One dump of as many ranks as hosts, each of which writes its part alone."""
    found = dataclasses.replace(report(step, len(hosts)), origin=site(origin_rank, step))
    for rank, host in enumerate(hosts):
        evidence = RankEvidence(rank, step, settings(), host, Device("cpu"), (site(rank),))
        alone = {"group": None, "world_size": len(hosts), "run_id": f"{run_id}{step}", "options": options}
        assert (
            write_dump(request(root, rank=rank, step=step, report=found, evidence=evidence, **alone)).path is not None
        )


def told(*roots):
    return incident_lines(incidents(list_dumps(roots)))


def test_the_same_step_in_each_run_is_deterministic(tmp_path):
    dumped(tmp_path, 12)
    assert told(tmp_path) == ""
    for run in "ab":
        dumped(tmp_path, 4812, run_id=run)
    assert "seen 3 times, steps 12, 4812, 4812\n" in told(tmp_path)
    for path in tmp_path.glob("step-00000012/*/*"):
        path.unlink()
    (tmp_path / "step-00000012" / "manifest.json").unlink()
    assert told(tmp_path) == (
        "\nforward \u00b7 layers.2.act \u00b7 output: NaN\n  seen 2 times, steps 4812, 4812: deterministic\n"
    )


def test_a_run_that_goes_on_may_meet_a_fault_twice_in_a_step(tmp_path):
    for _ in range(2):
        write_dump(request(tmp_path, options={"on_fault": "warn"}))
    assert told(tmp_path).endswith("steps 7, 7\n")


def test_a_host_is_named_where_another_one_could_have_had_it(tmp_path):
    for step, rank in ((5, 0), (6, 1)):
        hosts = ("good", "bad") if rank else ("bad", "good")
        dumped(tmp_path / "two", step, hosts, origin_rank=rank)
        dumped(tmp_path / "one", step, ("bad", "bad"), origin_rank=rank)
        dumped(tmp_path / "both", step, ("bad", "good"), origin_rank=rank)
    assert told(tmp_path / "two").endswith("steps 5, 6; always on host bad\n")
    assert told(tmp_path / "one").endswith("steps 5, 6\n")
    assert told(tmp_path / "both").endswith("steps 5, 6\n")


def test_runs_with_dump_dirs_of_their_own_are_no_parts_of_one_dump(tmp_path):
    """Not even where no launcher gave them different names."""
    for run in ("monday", "tuesday"):
        write_dump(request(tmp_path / run))
    shutil.copytree(tmp_path / "tuesday", tmp_path / "copy")
    paths = [Path(dump.path).parent.name for dump in list_dumps(tmp_path)]
    assert sorted(paths) == ["copy", "monday"], "one of each run"
    assert told(tmp_path).endswith("seen 2 times, steps 7, 7: deterministic\n")
