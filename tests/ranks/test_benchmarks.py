"""The short forms of the cost benchmarks: what can be counted is asserted, no time is."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from benchmarks import articles, cost_model, counts, fault_round, gpu, memory, profile_step
from benchmarks.counts import Found
from benchmarks.workloads import Case
from ddp_nanguard.report.types import MAX_SITES
from tests.ranks import run_ranks


def _count(rank: int, world_size: int, cases: list[tuple[Case, str]]) -> list[Found]:
    return [counts.counted(case, verdict) for case, verdict in cases]


def test_a_guarded_step_has_one_collective_one_host_read_and_a_kernel_per_probe() -> None:
    cases = [(Case("mlp", wrapper), "sync") for wrapper in ("ddp", "fsdp2")]
    for found in [each for rank in run_ranks(_count, cases=cases) for each in rank]:
        assert (found.collective_bytes, found.host_reads, found.waits) == ([16], 1, 1), found
        assert found.kernels == [1] * len(found.kernels) != [], found


def test_a_deferred_verdict_is_not_waited_for() -> None:
    for (found,) in run_ranks(_count, cases=[(Case("mlp"), "deferred")]):
        assert (found.collective_bytes, found.host_reads, found.waits) == ([16], 1, 0), found


@pytest.mark.exhaustive  # `test_compiled` has the same, of more models
def test_a_guard_adds_no_graph_no_break_and_no_recompilation() -> None:
    cases = [(Case("mlp", "ddp", "whole", "aot_eager"), "sync")]
    for (found,) in run_ranks(_count, cases=cases, timeout_s=50):
        assert (found.graphs, found.graph_breaks, found.recompilations) == ((1, 1), 0, 0), found


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"collective_bytes": [16, 16]}, "collectives"),
        ({"host_reads": 2}, "host reads"),
        ({"waits": 2}, "behind the collective"),
        ({"kernels": [1, 2]}, "kernels"),
    ],
)
def test_what_costs_more_is_refused(changed: dict[str, Any], what: str) -> None:
    cheap = {"collective_bytes": [16], "host_reads": 1, "waits": 1, "kernels": [1]}
    counts.require_cheap(Found(Case("mlp"), "sync", **cheap))
    with pytest.raises(AssertionError, match=what):
        counts.require_cheap(Found(Case("mlp"), "sync", **{**cheap, **changed}))


def test_the_fault_round_does_not_grow_with_ranks_or_sites() -> None:
    two, three = fault_round.measured([2, 3])
    assert (two["sites"], three["sites"]) == (MAX_SITES, MAX_SITES)
    assert two["collectives"] == three["collectives"] <= MAX_SITES + 10
    assert three["bytes"] - two["bytes"] <= 16
    assert three["bytes"] <= 1024 * (MAX_SITES + 4) + 8192  # the sites, and one text


def test_the_tensors_of_a_guard_are_what_the_formula_says() -> None:
    job = memory.Job(5, 64)
    off, on, shape = (
        run_ranks(memory.run, world_size=1, process_group=False, job=job, guarded=guarded, how=how)[0]
        for guarded, how in ((False, "tensors"), (True, "tensors"), (True, "shape"))
    )
    assert abs(on["tensors"] - off["tensors"] - memory.predicted(**shape)) <= 0.25 * memory.predicted(**shape)


def test_the_cost_model_finds_the_coefficients_that_made_the_points() -> None:
    a, b, c, d, e = 1e-3, 1e-5, 1e-10, 2e-4, 3e-5
    shapes = [(10, 1, 2), (100, 2, 2), (1000, 3, 2), (100, 500, 2), (10, 900, 4), (10, 1, 8)]
    points: list[dict[str, Any]] = []
    for probes, size, ranks in shapes:
        point = {"series": "ranks", "layers": probes, "width": 1, "micro_batches": 1, "ranks": ranks}
        measured = {"added_cpu_s": a + b * probes + c * size * 10**6, "collective_s": d + e * math.log2(ranks)}
        points.append({**point, "num_probes": probes, "size_bytes": size * 10**6, **measured})
    model = cost_model.fitted(points, num_cores=2)
    assert list(model["host"]["coefficients"].values()) == pytest.approx([a, b, c])
    assert list(model["verdict"]["log2(ranks)"]["coefficients"].values()) == pytest.approx([d, e])
    assert len(model["host"]["residuals"]) == 4
    json.dumps(model)


def _gpu(rank: int, world_size: int) -> dict[str, Any]:
    bench = gpu.Bench(torch.device("cpu"), gpu.SHORT, seconds=30)
    return json.loads(json.dumps(gpu.measured(bench, ["eager"])))  # type: ignore[no-any-return]


def test_the_gpu_script_runs_without_a_gpu() -> None:
    (found,) = run_ranks(_gpu, world_size=1)
    assert [row["dtype"] for row in found["bandwidth"]] == ["float32"] * 3 + ["bfloat16"] * 3
    for verdict in gpu.verdicts():
        assert found["eager"][verdict]["pairs"] == gpu.SHORT.pairs, found["eager"]


def _articles(rank: int, world_size: int) -> str:
    ways = [articles.Watch(), articles.Guard("NanGuard", layers="every"), articles.Anomaly()]
    return articles.table(articles.measured(ways, rounds=2))


def test_what_the_profile_of_a_step_times_is_called_in_one() -> None:
    (rows,) = run_ranks(_profile, world_size=1)
    assert not [label for label, row in rows.items() if row["calls"] < 1], rows


def _profile(rank: int, world_size: int) -> dict[str, dict[str, float]]:
    profile_step.WARM_UP, profile_step.STEPS = 1, 1
    return profile_step.profile("mlp")["rows"]  # type: ignore[no-any-return]


def test_the_benchmark_of_the_article_runs() -> None:
    (table,) = run_ranks(_articles, world_size=1)
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()]
    assert [row[0] for row in rows] == ["way", "---|---|---|---|---", "unguarded", "NanGuard", "detect_anomaly"]
    assert all(float(cell) > 0 for row in rows[2:] for cell in row[1:])
    assert rows[2][2] == rows[2][4] == "1.00"
