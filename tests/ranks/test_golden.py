"""The dump in ``tests/golden``: its form is pinned, and what lies on somebody's disk is read as it was meant."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_nanguard.capture.rng import restore
from ddp_nanguard.cli.main import main
from ddp_nanguard.dump import Dump, open_dump
from ddp_nanguard.dump.rank_records import Device, PlainState, RankEvidence, RankFileList, Writer
from ddp_nanguard.dump.records import SCHEMA_VERSION, Manifest, Run, TensorShape, Weights
from ddp_nanguard.dump.typed_json import as_json, read_as
from ddp_nanguard.report.types import Evidence, InlineCode, Phase, Site
from tests.golden import GOLDEN
from tests.golden.forms import form, path_of
from tests.golden.make import MADE_UP_LAUNCHER, make

RECORDS: list[tuple[str, Any]] = [
    ("manifest.json", Manifest),
    ("rank-00000/evidence.json", RankEvidence),
    ("rank-00001/evidence.json", RankEvidence),
    ("rank-00001/files.json", RankFileList),
    ("state.json", PlainState),
    ("writer.json", Writer),
]
CHANGED = (
    f"the form of a dump is not that of version {SCHEMA_VERSION}: raise SCHEMA_VERSION (ddp_nanguard/dump/records.py), "
    "then run python -m tests.golden.make and python -m tests.golden.forms"
)
ORIGIN = Site(1, 2, 0, Phase.FORWARD, "root", 1, "output", "nan")
SITES = (
    ORIGIN,
    Site(1, 2, 0, Phase.FORWARD, "", 1, "output", "nan", InlineCode("", None, None)),
    Site(1, 2, 0, Phase.LOSS, None, None, "loss", "nan", None, Evidence((), "float32", 1, 0, 0, 1, None), "nan"),
    Site(1, 2, 0, Phase.BACKWARD, "", 1, "grad", "nan", InlineCode(None, "loss", "")),
    Site(1, 2, 0, Phase.BACKWARD, "", 1, "scale", "nan", input_kind="unchecked"),
)


@pytest.fixture(scope="module")
def dump() -> Dump:
    return open_dump(GOLDEN)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What this package writes now."""
    target = tmp_path_factory.mktemp("made") / GOLDEN.name
    make(target)
    return target


def test_the_form_is_that_of_its_version(made: Path) -> None:
    pinned = path_of(SCHEMA_VERSION)
    assert pinned.exists(), CHANGED
    if open_dump(GOLDEN).manifest.versions["torch"] == torch.__version__:  # a wrapper's options are those of torch
        assert form(made).splitlines() == pinned.read_text().splitlines(), CHANGED
    assert form(GOLDEN).splitlines() == pinned.read_text().splitlines(), CHANGED


def test_the_golden_dump_is_what_is_made_now(made: Path) -> None:
    def files(path: Path) -> list[str]:
        return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())

    assert files(made) == files(GOLDEN), CHANGED
    assert open_dump(made).report == open_dump(GOLDEN).report
    assert open_dump(made).evidence(1).sites == open_dump(GOLDEN).evidence(1).sites


@pytest.mark.parametrize(("path", "kind"), RECORDS)
def test_a_record_is_written_as_it_was_read(path: str, kind: Any) -> None:
    data = json.loads((GOLDEN / path).read_text())
    record = kind.from_dict(data) if hasattr(kind, "from_dict") else read_as(kind, data)
    assert as_json(record) == data


def test_the_report(dump: Dump) -> None:
    report = dump.report
    assert (report.step, report.world_size, report.wrapper, report.origin) == (2, 2, "ddp", ORIGIN)
    assert report.sites == SITES
    assert (report.num_ranks_affected, report.ranks_affected, report.holders) == (2, (0, 1), ())
    assert report.cause == "edge of domain: sqrt of a negative number in `values.sqrt()` (recipe.py:19), at index 2"
    assert (report.nonfinite_state, report.unchecked, report.notes) == ((), (), ())
    look = report.second_look
    assert look is not None and (look.outcome, look.text) == ("same", "same on all 2 ranks: deterministic")
    assert look.operator is not None and (look.operator.rank, look.operator.name) == (1, "aten.sqrt.default")
    assert look.operator.line == "/job/tests/golden/recipe.py:19 in Root.forward" and not look.operator.in_backward
    assert look.operator.output == Evidence((4,), "float32", 1, 0, 0, 4, 5.0)
    assert (report.single_rank_view, report.dump_path) == (False, "/job/nan_dumps/step-00000002")


def test_the_manifest(dump: Dump) -> None:
    manifest = dump.manifest
    assert manifest.created == "2026-01-01T00:00:00+0000"
    run = Run("golden-localhost-29500-0", ("train.py",), "/job/tests", ("python", "train.py"), "/job", MADE_UP_LAUNCHER)
    assert manifest.run == run
    assert (manifest.wrapper_description.kind, manifest.wrapper_description.compiled) == ("ddp", False)
    assert (manifest.options.history, manifest.options.layers) == (2, "every")
    assert manifest.recipe == "tests.golden.recipe:recipe"
    assert manifest.aliases == {} and manifest.shapes == {
        "model.scale": TensorShape((4,), "float32"),
        "optim.0.scale.momentum_buffer": TensorShape((4,), "float32"),
    }
    assert (manifest.ranks_present, manifest.alone, manifest.weights) == ((0, 1), False, Weights(True, None))
    assert (manifest.problems, manifest.replicas_disagree, len(manifest.files)) == ((), (), 12)


def test_the_evidence(dump: Dump) -> None:
    evidence = dump.evidence(1)
    assert (evidence.rank, evidence.step, evidence.host, evidence.device) == (1, 2, "golden", Device("cpu"))
    assert evidence.sites[:-1] == SITES
    last = evidence.sites[-1]
    assert (last.phase, last.slot, last.rank, last.evidence and last.evidence.first) == ("reduce", "scale", None, (2,))
    assert evidence.reduced_micro_batches == (0,) and evidence.dtypes == {"scale": "float32"}
    assert evidence.hyper_parameters == {"g0.lr": 0.0, "g0.momentum": 0.5}
    assert dump.evidence(0).sites[0].rank is None


def test_the_window_and_the_state(dump: Dump) -> None:
    (micro_batch,) = dump.window(1)
    assert micro_batch.batch["x"].tolist() == [4.0, 9.0, -16.0, 25.0]
    assert micro_batch.batch["y"].tolist() == [2.0, 3.0, 4.0, 5.0]
    assert (micro_batch.index, micro_batch.modified, micro_batch.scaler) == (0, [], None)
    assert micro_batch.losses["loss"].isnan() and restore(micro_batch.random_state) == []
    assert dump.buffers(1)["num_calls"].item() == 2 and dump.special(1) == {}
    state = dump.load_state(rank=1)
    assert state["model.scale"].tolist() == [1.0, 2.0, 4.0, 8.0]
    assert state["optim.0.scale.momentum_buffer"].dtype is torch.float32
    assert dump.plain_state()["optimizers"][0]["class"] == "SGD"
    assert dump.history(1)["steps"].tolist() == [0, 1]


def test_it_is_shown_and_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(GOLDEN)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[:2] == ["rank 1, step 2, micro-batch 0, forward", "  root (call 1): finite in, NaN out"]
    threads = torch.get_num_threads()
    try:
        code = main(["replay", str(GOLDEN), "--json"])
    finally:
        torch.set_num_threads(threads)
    outcome = json.loads(capsys.readouterr().out)
    assert (code, outcome["outcome"], outcome["rank"]) == (0, "same", 1), outcome


def test_nothing_of_a_machine_is_in_it() -> None:
    for file in GOLDEN.rglob("*"):
        if file.is_file():
            data = file.read_bytes()
            assert not re.search(rb"/(?:work|tmp|home|root|Users)/", data), file
            assert str(Path.home()).encode() not in data or str(Path.home()) == "/", file


def test_a_part_of_it_opens(tmp_path: Path) -> None:
    part = Path(shutil.copytree(GOLDEN, tmp_path / GOLDEN.name))
    shutil.rmtree(part / "rank-00000")
    opened = open_dump(part)
    assert (opened.ranks, opened.missing_ranks) == ([1], [0])
    assert opened.load_state(rank=1).keys() == {"model.scale", "optim.0.scale.momentum_buffer"}
