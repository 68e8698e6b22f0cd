"""What the second look says, job by job: each is a few lines that a user could have written, with one fault."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.ranks.look_loops import JOBS

Pair = tuple[dict[str, Any], dict[str, Any]]


def _run_jobs(rank: int, world_size: int, names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        torch.manual_seed(0)
        try:
            found[name] = JOBS[name]()
        except Exception as error:
            error.add_note(name)
            raise
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, Pair]:
    """All jobs, one after the other in the same two processes."""
    first, second = run_ranks(_run_jobs, names=list(JOBS), timeout_s=55)
    return {name: (first[name], second[name]) for name in JOBS}


def _looks(pair: Pair) -> dict[str, Any]:
    """The second look, which is the same on both ranks."""
    first, second = pair
    assert first["text"] == second["text"]
    assert first["look"] == second["look"]
    look: dict[str, Any] = first["look"]
    return look


def _named(pair: Pair, code: str, rank: int = 1) -> dict[str, Any]:
    look = _looks(pair)
    assert look["operator"] is not None, pair[0]["text"]
    assert (look["operator"]["rank"], look["operator"]["code"]) == (rank, code)
    assert f": {code}" in pair[0]["text"]
    return look


DIVISION = "return self.lin(values) / divisor"
DIVISIONS = [
    "augmented", "output in place", "penalty in the step", "opaque, ddp", "opaque, fsdp2",
    "attributes, plain", "attributes, ddp", "attributes, fsdp1", "attributes, fsdp2", "hooks", "two calls, ddp",
    "two calls, fsdp1", "two calls, fsdp2", "logits and loss", "logits and loss, both used", "upstream", "popped",
    "leaf", "higher order", "open, ddp", "no loss", "run and call", "closure", "checkpoint", "checkpoint, reentrant",
    "redacted",
]  # fmt: skip


@pytest.mark.parametrize("name", DIVISIONS)
def test_the_same_bits_come_again_and_the_division_is_named(found: dict[str, Pair], name: str) -> None:
    """Whatever the loop and the model do with calls, arguments, buffers, outputs and hooks.

    Two calls before one loss are run in one backward; an alias of ``(logits, loss)`` gets what the loop gave and no
    more; arguments come without the graph behind them, in containers of their own; branches of `torch.cond` are
    traced.
    """
    look = _named(found[name], DIVISION)
    assert look["outcome"] == "same", look["text"]
    assert look["operator"]["name"] == "aten.div.Tensor"
    assert found[name][0]["origin"]["layer"] == "part"
    assert found[name][0]["origin"]["phase"] == "forward"


def test_a_fault_that_does_not_come_again_names_rank_host_and_device(found: dict[str, Pair]) -> None:
    for name in ("hardware", "hardware, sharded"):
        look = _looks(found[name])
        assert look["outcome"] == "finite"
        assert look["text"].startswith("rank 1 finite on the second run")
        same = "arguments, weights, buffers, random states, settings and modes were the same: "
        assert same in look["text"]
        assert look["text"].endswith(f"; last of all that device ({socket.gethostname()}, cpu)")
        assert look["operator"] is None, "nothing was seen to make it"
        assert look["text"] in found[name][0]["text"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("counting", "rank 0: not compared: Python state that a call changes (1.counted)"),
        (
            "counting around",
            "rank 0: not compared: Python state that a call changes (counting_around.<locals>.counts.counted)",
        ),
        ("thawed", "rank 0: it was not given the same: which parameters got a gradient (0.weight, 2.weight)"),
        ("swapped", "rank 1: it was not given the same: weights (their memory was swapped since the forward)"),
        ("overwritten", "rank 0: not compared: the bits of large arguments ([0])"),
    ],
)
def test_a_device_is_not_suspected_where_the_second_run_may_have_been_given_something_else(
    found: dict[str, Pair], name: str, said: str
) -> None:
    look = _looks(found[name])
    assert look["outcome"] == "finite"
    assert said in look["text"]
    assert "device" not in found[name][0]["text"] and "hardware" not in found[name][0]["text"]


def test_random_streams_are_those_of_the_call_and_not_those_of_the_loader(found: dict[str, Pair]) -> None:
    assert _looks(found["drawn"])["outcome"] == "same"


def test_memory_that_nobody_wrote_is_named_with_the_line_that_reads_it(found: dict[str, Pair]) -> None:
    """By one more run, in which fresh memory is filled with NaN; the setting for that is put back."""
    look = _named(found["memory"], "return self.lin(values) + scratch")
    assert look["outcome"] == "finite"
    assert look["text"].endswith("something reads memory that nobody wrote")
    assert all(job["flags"] == (False, False, True) for job in found["memory"])


def test_a_parameter_used_outside_of_its_module_is_met(found: dict[str, Pair]) -> None:
    look = _looks(found["held outside"])
    assert look["outcome"] == "not_done"
    assert "parameter head.weight is used outside of the module that owns it" in look["text"]


@pytest.mark.parametrize("wrap", ["plain", "ddp", "fsdp1", "fsdp2"])
def test_attributes_and_late_buffers_are_those_of_training(found: dict[str, Pair], wrap: str) -> None:
    for job in found[f"attributes, {wrap}"]:
        assert job["seen"] == [(1, True, False), (2, True, False), (3, True, True)]


def test_hooks_of_the_job_on_parameters_do_not_run_again(found: dict[str, Pair]) -> None:
    for name in ("hooks", "hooks, at fault"):
        assert [job["calls"] for job in found[name]] == [3 * 4, 3 * 4]

    for wrap in ("ddp", "fsdp1", "fsdp2"):
        for job in found[f"counted hooks, {wrap}"]:
            assert job["calls"] == (0 if wrap == "fsdp1" else 3 * 4), wrap


def test_a_distributed_output_is_screened_without_communication(found: dict[str, Pair]) -> None:
    assert [(job["sum"], job["collectives"]) for job in found["sums of parts"]] == [(8.0, 0), (8.0, 0)]


def test_a_hook_of_the_job_that_spoils_a_gradient_is_not_taken_for_hardware(found: dict[str, Pair]) -> None:
    look = _looks(found["hooks, at fault"])
    assert look["outcome"] == "same"
    assert "a hook of the job on the parameter changed them" in look["text"]
    assert look["operator"] is None


@pytest.mark.parametrize("wrap", ["plain", "fsdp2"])
def test_an_update_within_the_backward_is_met(found: dict[str, Pair], wrap: str) -> None:
    look = _looks(found[f"updated within, {wrap}"])
    assert (look["outcome"], look["text"]) == (
        "not_done",
        "not done: the weights were updated already, within the step",
    )


@pytest.mark.parametrize("name", ["buffers", "buffers, first silent", "buffers, both communicate"])
def test_ddp_writes_rank_0s_buffers_over_those_of_others_where_it_did_in_training(
    found: dict[str, Pair], name: str
) -> None:
    """Else the output of rank 1 has other bits: it depends on a buffer."""
    look = _named(found[name], DIVISION, rank=0)
    assert look["outcome"] == "same", look["text"]


def test_gradients_outside_of_the_model_are_left_alone(found: dict[str, Pair]) -> None:
    """Those of a module before the model, and of an argument that is a leaf."""
    for name in ("upstream", "leaf"):
        for looked, not_looked in zip(found[name], found[f"{name}, not looked"], strict=True):
            assert looked["gradients"] == not_looked["gradients"] and len(looked["gradients"]) == 3
            assert looked["state"] == not_looked["state"]


@pytest.mark.parametrize("how", ["tensor", "data", "numpy"])
def test_an_argument_that_the_loop_has_changed_is_met(found: dict[str, Pair], how: str) -> None:
    """Also where it is changed by way of NumPy or ``.data``, which its version does not tell."""
    look = _looks(found[f"changed, {how}"])
    assert look["outcome"] == "not_done"
    assert "argument [0] was changed after the call" in look["text"]


def test_a_compiled_step_is_confirmed_compiled_and_placed_by_an_eager_run(found: dict[str, Pair]) -> None:
    look = _named(found["compiled"], DIVISION)
    assert look["outcome"] == "same"
    assert look["text"].endswith("compiled; the place is that of an eager run, which is not the compiled step")


def test_a_kernel_that_is_bad_only_compiled_is_blamed_for_it(found: dict[str, Pair]) -> None:
    look = _looks(found["compiled badly"])
    assert look["outcome"] == "same" and look["operator"] is None
    assert look["text"].endswith("finite when it runs eagerly: suspect the kernel that torch.compile made")


def test_what_cannot_be_traced_is_still_watched_layer_by_layer(found: dict[str, Pair]) -> None:
    look = _looks(found["no trace"])
    assert look["outcome"] == "same" and look["operator"] is None
    assert found["no trace"][0]["origin"]["layer"] == "part"
    assert "the operator was not looked for: rank 1: NotImplementedError" in found["no trace"][0]["text"]


@pytest.mark.parametrize("wrap", ["fsdp1", "fsdp2"])
def test_a_sharded_step_that_has_not_ended_is_not_run_again(found: dict[str, Pair], wrap: str) -> None:
    look = _looks(found[f"open, {wrap}"])
    assert look["outcome"] == "not_done"
    assert "a forward still waits for its backward: the window is open" in look["text"]


def test_a_step_function_must_return_its_losses(found: dict[str, Pair]) -> None:
    rest = "return the loss that is backpropagated, a tensor, or a dict of named losses"
    for job in found["no loss"]:
        assert job["texts"] == [
            f"guard.run(no_loss_{index}, batch): the step function returned a {what}; {rest}"
            for index, what in enumerate(["NoneType", "dict of float", "dict of nothing"])
        ]


def test_both_ways_to_call_the_model_in_one_window(found: dict[str, Pair]) -> None:
    assert found["run and call"][0]["origin"]["micro_batch"] == 1


def test_a_loss_is_named_with_its_line_where_it_is_part_of_the_step(found: dict[str, Pair]) -> None:
    look = _named(found["loss in the step"], "return (logits.square().sum(1) / batch[1][:, 0]).mean()")
    assert look["outcome"] == "same"
    assert found["loss in the step"][0]["origin"]["phase"] == "loss"


def test_a_loss_that_is_not_run_again_is_not_put_down_to_an_operator_of_the_model(found: dict[str, Pair]) -> None:
    look = _looks(found["loss outside"])
    assert look["operator"] is None
    assert look["text"].endswith("the loss was not run again: guard.run(step, batch) would name its line")
    assert found["loss outside"][0]["origin"]["phase"] == "loss"


def test_a_gradient_within_the_loss_needs_the_whole_step(found: dict[str, Pair]) -> None:
    look = _looks(found["penalty"])
    assert look["outcome"] == "not_done"
    assert "differentiated with create_graph=True, and that is not recorded; guard.run(step, batch)" in look["text"]


def test_a_backward_that_runs_only_once_costs_the_second_look_and_no_more(found: dict[str, Pair]) -> None:
    look = _looks(found["backward once"])
    assert look["text"] == "not done: rank 0: RuntimeError: this backward runs once"
    assert found["backward once"][0]["origin"]["phase"] == "backward"


def test_without_the_option_there_is_no_second_look(found: dict[str, Pair]) -> None:
    assert _looks(found["off"]) is None
    assert "again:" not in found["off"][0]["text"]


def test_nothing_keeps_an_output_that_the_loop_has_dropped(found: dict[str, Pair]) -> None:
    """Without the collector, with a backward and without one."""
    assert [job["gone"] for job in found["dropped outputs"]] == [[True] * 3] * 2


def test_a_redacted_dump_gets_the_second_look_too(found: dict[str, Pair]) -> None:
    for job in found["redacted"]:
        assert job["kept"] == _looks(found["redacted"])


def test_of_faults_of_one_kind_that_are_skipped_only_the_first_three_are_looked_at(found: dict[str, Pair]) -> None:
    for job in found["many skips"]:
        assert [line.split(" · ")[1] for line in job["lines"]] == [f"step {step}" for step in range(3)]
