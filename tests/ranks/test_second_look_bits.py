"""The second look leaves no trace: what it saw is right, and the job goes on as if it had not been."""

from __future__ import annotations

import pytest

from tests.ranks import run_ranks
from tests.ranks.looking import BAD_STEP, SOURCE, Ended, Look, is_sharded, run_pairs

STOPS = [
    Look("plain", follows=True, accumulation=2),
    Look("ddp_view", accumulation=2),
    Look("ddp_static", checkpointing="REENTRANT"),
    Look("ddp", fused=True, options={"verdict": "deferred"}),
    Look("fsdp1", scales=True),
    Look("fsdp1_flat", accumulation=2, checkpointing="NO_REENTRANT"),
    Look("fsdp2_keep", runs=True, accumulation=3),
    Look("fsdp2", checkpointing="REENTRANT", halves=True),
]
MORE_STOPS = [
    Look("plain"),
    Look("ddp"),
    Look("ddp", accumulation=3),
    Look("ddp_unused"),
    Look("ddp_static"),
    Look("ddp_power_sgd"),
    Look("ddp_fp16_hook"),
    Look("ddp", runs=True),
    Look("ddp", scales=True),
    Look("ddp", autocasts=True, accumulation=2),
    Look("ddp", checkpointing="NO_REENTRANT"),
    Look("ddp", follows=True),
    Look("ddp", halves=True),
    Look("ddp", options={"layers": "every"}),
    Look("fsdp1"),
    Look("fsdp1", runs=True),
    Look("fsdp1", checkpointing="REENTRANT"),
    Look("fsdp1", checkpointing="NO_REENTRANT"),
    Look("fsdp1_no_shard"),
    Look("fsdp1_grad_op"),
    Look("fsdp1_grad_op", checkpointing="NO_REENTRANT"),
    Look("fsdp2"),
    Look("fsdp2", accumulation=3),
    Look("fsdp2", scales=True),
    Look("fsdp2", autocasts=True),
    Look("fsdp2", checkpointing="NO_REENTRANT"),
    Look("fsdp2", fused=True, options={"verdict": "deferred"}),
    Look("fsdp2", options={"layers": "blocks"}),
    Look("fsdp2_keep"),
    Look("fsdp2_bf16", norms=False),
    Look("fsdp2_offload"),
    Look("fsdp2_prefetch"),
]
GO_ON = [
    Look("ddp", options={"on_fault": "skip"}, accumulation=2),
    Look("ddp", options={"on_fault": "warn"}),
    Look("fsdp1", options={"on_fault": "warn"}, accumulation=2),
    Look("fsdp1_flat", options={"on_fault": "skip"}),
    Look("fsdp2", options={"on_fault": "skip"}, accumulation=2),
    Look("fsdp2_keep", options={"on_fault": "warn"}),
]
MORE_GO_ON = [
    Look(kind, options={"on_fault": policy}, accumulation=accumulation)
    for kind in ("plain", "ddp", "fsdp1", "fsdp1_flat", "fsdp2", "fsdp2_keep")
    for policy in ("skip", "warn")
    for accumulation in (1, 2)
]
ON_MESH = [Look("hsdp", accumulation=2), Look("tp", norms=False)]


def _check(look: Look, pairs: list[tuple[Ended, Ended]]) -> None:
    for looked, not_looked in pairs:
        for step, (one, other) in enumerate(zip(looked.states, not_looked.states, strict=True)):
            different = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
            assert not different, f"{look.name}: step {step}: {different}"
        if look.options.get("on_fault", "stop") == "stop":
            _check_answer(look, looked)
        else:
            again = [line for line in looked.lines if " · second look: " in line]
            assert f"step {BAD_STEP} · " in again[0] and " · second look: same" in again[0], (look.name, looked.lines)
        if not is_sharded(look.kind) or look.options.get("on_fault") == "warn":
            assert looked.gradients == not_looked.gradients, look.name
    assert len({looked.text for looked, _ in pairs}) == 1


def _check_answer(look: Look, looked: Ended) -> None:
    assert looked.report is not None, look.name
    assert looked.looked["outcome"] == "same", f"{look.name}: {looked.looked}"
    origin, operator = looked.report["origin"], looked.looked["operator"]
    assert (looked.report["step"], origin["layer"], origin["micro_batch"]) == (
        BAD_STEP,
        "divided",
        look.accumulation - 1,
    ), look.name
    assert operator is not None, f"{look.name}: {looked.text}"
    assert operator["name"] == "aten.div.Tensor" and operator["code"] == SOURCE, f"{look.name}: {operator}"


def _check_all(looks: list[Look], world_size: int = 2) -> None:
    found = run_ranks(run_pairs, world_size, looks=looks, timeout_s=55)
    for look, pairs in zip(looks, zip(*found, strict=True), strict=True):
        _check(look, list(pairs))


@pytest.mark.parametrize(
    "looks",
    [
        pytest.param(STOPS, id="stops"),
        pytest.param(GO_ON, id="goes on"),
        pytest.param(MORE_STOPS, id="more stops", marks=pytest.mark.exhaustive),
        pytest.param(MORE_GO_ON, id="more that go on", marks=pytest.mark.exhaustive),
    ],
)
def test_training_goes_on_to_the_bit(looks: list[Look]) -> None:
    """Weights, optimizer state, buffers, random states and registered things are those of a run without a second look.

    So they are after an error that the loop catches, a skipped step and a warning; gradients too, where they are
    promised.
    """
    _check_all(looks)


@pytest.mark.exhaustive
def test_it_leaves_no_trace_on_a_mesh_of_two_dimensions() -> None:
    _check_all(ON_MESH, world_size=4)
