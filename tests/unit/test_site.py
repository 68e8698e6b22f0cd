"""Sites and reports: plain data that survives JSON and pickling, in causal order."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_nanguard.blame import exchange
from ddp_nanguard.errors import NonFiniteError
from ddp_nanguard.report.types import (
    KINDS,
    LOOK_OUTCOMES,
    Evidence,
    FaultReport,
    FirstOperator,
    InlineCode,
    Phase,
    SecondLook,
    Site,
    json_safe,
)

names = st.none() | st.text(max_size=20)
counts = st.integers(min_value=0, max_value=10**12)
betweens = st.builds(InlineCode, names, names, names)
evidences = st.builds(
    Evidence,
    st.lists(counts, max_size=4).map(tuple),
    st.sampled_from(["float32", "bfloat16"]),
    counts,
    counts,
    counts,
    counts,
    st.none() | st.floats(allow_nan=False, allow_infinity=True, min_value=0),
)
sites = st.builds(
    Site,
    rank=st.none() | counts,
    step=counts,
    micro_batch=st.none() | counts,
    phase=st.sampled_from(Phase),
    layer=names,
    call=st.none() | counts,
    slot=st.text(max_size=20),
    kind=st.sampled_from(KINDS),
    inline_code=st.none() | betweens,
    evidence=st.none() | evidences,
)
operators = st.none() | st.builds(
    FirstOperator, counts, st.text(max_size=9), names, st.text(max_size=9), st.booleans(), st.none() | evidences
)
reports = st.builds(
    FaultReport,
    step=counts,
    world_size=counts,
    wrapper=st.sampled_from(["plain", "ddp", "fsdp1", "fsdp2"]),
    origin=st.none() | sites,
    sites=st.lists(sites, max_size=3).map(tuple),
    holders=st.lists(counts, max_size=3).map(tuple),
    num_ranks_affected=counts,
    ranks_affected=st.lists(counts, max_size=3).map(tuple),
    cause=st.text(max_size=20),
    nonfinite_state=st.lists(st.text(max_size=9), max_size=3).map(tuple),
    unchecked=st.lists(st.text(max_size=9), max_size=3).map(tuple),
    notes=st.lists(st.text(max_size=9), max_size=3).map(tuple),
    dump_path=names,
    second_look=st.none() | st.builds(SecondLook, st.sampled_from(LOOK_OUTCOMES), st.text(max_size=20), operators),
)

SITE = Site(37, 4812, 3, Phase.FORWARD, "layers.17.mlp.act", 1, "output", "nan")


def test_phases_are_in_causal_order() -> None:
    order = ["state", "input", "forward", "loss", "backward", "reduce", "loop", "optimizer"]
    assert sorted(order, key=lambda name: Phase(name).causal_rank) == order


@given(sites)
def test_a_site_survives_strict_json(site: Site) -> None:
    text = json.dumps(site.to_dict(), allow_nan=False)
    assert Site.from_dict(json.loads(text)) == site


@given(reports)
def test_a_report_survives_strict_json_and_pickling(report: FaultReport) -> None:
    text = json.dumps(report.to_dict(), allow_nan=False)
    assert FaultReport.from_dict(json.loads(text)) == report
    error = pickle.loads(pickle.dumps(NonFiniteError("text", report)))
    assert (str(error), error.report) == ("text", report)


def test_the_fields_of_a_report_are_the_documented_ones() -> None:
    report = FaultReport(1, 2, "ddp", SITE).to_dict()
    documented = (
        "step world_size wrapper origin inline_code holders sites ranks_affected cause nonfinite_state dump_path"
    )
    assert set(documented.split()) <= set(report)
    origin_fields = {"rank", "micro_batch", "phase", "layer", "call", "slot", "kind"}
    assert origin_fields <= set(report["origin"])
    assert report["ranks_affected"] == {"count": 0, "first": []}


def test_further_keys_of_a_report_are_ignored() -> None:
    report = FaultReport(1, 2, "ddp", None)
    assert FaultReport.from_dict(report.to_dict() | {"later": 1}) == report


def test_the_same_place_sets_rank_and_step_aside() -> None:
    assert SITE.same_place(dataclasses.replace(SITE, rank=0, step=1, order=9))
    changes = {"layer": "other", "call": 2, "slot": "input", "kind": "inf", "micro_batch": 0, "phase": Phase.BACKWARD}
    for name, value in changes.items():
        assert not SITE.same_place(dataclasses.replace(SITE, **{name: value})), name  # type: ignore[arg-type]


def test_non_finite_numbers_are_strings_in_json() -> None:
    assert json_safe({"a": [math.nan, (math.inf, -math.inf)], "b": 1.5}) == {"a": ["nan", ["inf", "-inf"]], "b": 1.5}


@pytest.mark.parametrize("letter", ["x", "層", "𝕏"])
@pytest.mark.parametrize("length", [10, 250, 300, 5000])
@pytest.mark.parametrize("num_suspects", [0, 3, 400])
def test_a_site_crosses_ranks_however_long_its_names_are(letter: str, length: int, num_suspects: int) -> None:
    name = f"a{letter * length}z"
    site = Site(
        rank=1,
        step=2,
        micro_batch=0,
        phase=Phase.BACKWARD,
        layer=name,
        call=1,
        slot=name,
        kind="nan",
        inline_code=InlineCode(name, name, name),
        evidence=Evidence((3, 4), "float32", 1, 0, 0, 12, 5.0, (0, 1)),
        neg_inf_from=name,
        suspects=(name,) * num_suspects,
    )
    text = exchange._site_text(site)
    assert len(text.encode()) <= exchange._SITE_BYTES
    crossed = Site.from_dict(json.loads(text))
    assert (crossed.rank, crossed.step, crossed.micro_batch, crossed.phase) == (1, 2, 0, Phase.BACKWARD)
    assert crossed.layer is not None and crossed.layer[:2] == name[:2] and crossed.layer[-2:] == name[-2:]
    if letter == "x" and length == 10 and num_suspects == 0:
        assert crossed == site
    if num_suspects == 400 and crossed.suspects:
        assert crossed.suspects[-1] == "396 more"
