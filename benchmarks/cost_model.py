"""What a guarded step adds, as a model fitted by least squares, and what it says of a job of thousands of ranks.

    host seconds   = a + b * probes + c * bytes            (of this machine's processor, or of its launches on a device)
    verdict        = d + e * log2(ranks)   or   d + e * ranks

The first is fitted on the processor time of all points with at least as many cores as ranks, the second on the
collective by itself. Relative errors are minimised, so that the small points count.
"""

from __future__ import annotations

import math
from typing import Any

import numpy

LARGE = (1024, 16384)
HOP_S = 5e-6
"""Assumed for one step of a tree over a fast network, latency of the library included; two trips per verdict."""


def fitted(points: list[dict[str, Any]], num_cores: int) -> dict[str, Any]:
    """The model, ready for JSON.

    Args:
        points: of `scale.py`.
        num_cores: of the machine; points with more ranks are not used for the host's part.
    """
    quiet = [point for point in points if point["ranks"] <= num_cores]
    host = _fit(
        {"a": [1.0] * len(quiet), "b": [p["num_probes"] for p in quiet], "c": [p["size_bytes"] for p in quiet]},
        [point["added_cpu_s"] for point in quiet],
    )
    ranked = [point for point in points if point["series"] == "ranks"]
    ranks, times = [point["ranks"] for point in ranked], [point["collective_s"] for point in ranked]
    ones = [1.0] * len(ranked)
    tree = _fit({"d": ones, "e": [math.log2(count) for count in ranks]}, times)
    line = _fit({"d": ones, "e": [float(count) for count in ranks]}, times)
    return {
        "host": {**host, "points": [_name(point) for point in quiet]},
        "verdict": {"log2(ranks)": tree, "ranks": line, "points": ranks},
        "assumed_hop_s": HOP_S,
        "extrapolated": {str(count): _extrapolated(count, line) for count in LARGE},
    }


def _fit(terms: dict[str, list[float]], values: list[float]) -> dict[str, Any]:
    """Coefficients that are not negative, since no part of a step takes less than no time."""
    kept = dict(terms)
    wanted = numpy.asarray(values)
    weights = 1 / numpy.maximum(numpy.abs(wanted), 1e-9)
    while True:
        columns = numpy.stack([numpy.asarray(column, dtype=float) for column in kept.values()], axis=1)
        scales = numpy.abs(columns).max(axis=0)
        found, *_ = numpy.linalg.lstsq(columns / scales * weights[:, None], wanted * weights, rcond=None)
        lowest = list(kept)[int(found.argmin())]
        if found.min() >= 0 or len(kept) == 1:
            break
        del kept[lowest]
    predicted = columns / scales @ found
    coefficients = dict(zip(kept, (found / scales).tolist(), strict=True))
    return {
        "coefficients": {name: coefficients.get(name, 0.0) for name in terms},
        "residuals": [round(float(r), 3) for r in (predicted - wanted) / wanted],
        "rms": round(float(numpy.sqrt(numpy.mean(((predicted - wanted) / wanted) ** 2))), 3),
    }


def _name(point: dict[str, Any]) -> str:
    return "{layers} layers of {width}, {micro_batches} micro-batch(es), {ranks} ranks".format(**point)


def _extrapolated(ranks: int, line: dict[str, Any]) -> dict[str, float]:
    """Seconds of one verdict: in a tree with the assumed hop, and if the line fitted here went on."""
    coefficients = line["coefficients"]
    return {"tree_s": 2 * HOP_S * math.log2(ranks), "line_s": coefficients["d"] + coefficients["e"] * ranks}


def described(model: dict[str, Any]) -> str:
    """For people."""
    c = model["host"]["coefficients"]
    speed = f"{c['c'] * 1e9:.3f} ms per MB ({1e-9 / c['c']:.1f} GB/s)" if c["c"] else "0 per byte"
    lines = [
        f"host: {1e3 * c['a']:.3f} ms + {1e6 * c['b']:.2f} us per probe + {speed}; "
        f"residuals {_percent(model['host']['rms'])} (root mean square)"
    ]
    lines += [
        f"  {_percent(residual):>6}  {name}"
        for residual, name in zip(model["host"]["residuals"], model["host"]["points"], strict=True)
    ]
    for term in ("log2(ranks)", "ranks"):
        fit = model["verdict"][term]
        d, e = fit["coefficients"]["d"], fit["coefficients"]["e"]
        residuals = ", ".join(map(_percent, fit["residuals"]))
        lines.append(f"verdict: {1e3 * d:.3f} ms + {1e3 * e:.4f} ms * {term}; residuals {residuals}")
    for ranks, found in model["extrapolated"].items():
        tree = f"{1e3 * found['tree_s']:.2f} ms in a tree of {1e6 * model['assumed_hop_s']:.0f} us per hop and trip"
        lines.append(f"{ranks} ranks: {tree}, {1e3 * found['line_s']:.0f} ms along the line fitted here")
    return "\n".join(lines)


def _percent(value: float) -> str:
    return f"{100 * value:+.0f} %" if value else "0 %"
