"""Dumps for the tests of the report page: one of many ranks, made cheaply, and variations of it."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
import shutil
from pathlib import Path

import numpy as np

from ddp_nanguard.dump import write_dump
from ddp_nanguard.dump.history import FAULT, SERIES, step_prefix
from ddp_nanguard.dump.names import EVIDENCE, FILES_JSON, HISTORY, MANIFEST, rank_name
from ddp_nanguard.report.slot_key import PARAMETER_GRADIENT, SlotKey
from ddp_nanguard.report.types import Evidence, FirstOperator, Phase, SecondLook, Site
from tests.dump_requests import report, request

STEP, FIRST_BAD_LAYER, NUM_LAYERS = 4812, 20, 40
NASTY = "<script>alert('layer')</script>&<b>bold</b>"
"""A name of a layer that must be shown as it is, and do nothing."""


def layer(number: int) -> str:
    """The name of a layer, long as they are in practice; one of them is `NASTY`."""
    return NASTY if number == 3 else f"model.decoder.layers.{number}.self_attention.output_projection"


def slots(step: int, rank: int, bad: bool) -> tuple[np.ndarray, np.ndarray]:
    """Labels and values of outputs that grow until float16 ends, a loss, and gradients."""
    outputs = [SlotKey(Phase.FORWARD, 0, layer(number), 1, "output") for number in range(NUM_LAYERS)]
    losses = [SlotKey(Phase.LOSS, 0, "loss", None, "")]
    gradients = [SlotKey(Phase.BACKWARD, 0, f"{key.name}.weight", None, PARAMETER_GRADIENT) for key in outputs[::-1]]
    keys = [*outputs, *losses, *gradients]
    numbers = np.arange(len(keys))
    values = 10.0 ** (numbers % NUM_LAYERS / 10 + (step - STEP) / 12 + rank % 7 / 20)
    values[NUM_LAYERS:] /= 1e3
    values[-1] = 0.0
    if bad:
        values[FIRST_BAD_LAYER] = np.inf
        values[FIRST_BAD_LAYER + 1 :] = np.nan
    labels = np.array([key.to_label() for key in keys])
    return labels, np.stack([-values, values], 1)


def history(rank: int, steps: range, bad: bool) -> dict[str, np.ndarray]:
    """The arrays of one rank."""
    arrays = {name: np.full(len(steps), np.nan) for name in SERIES} | {"steps": np.array(steps, dtype=np.int64)}
    for prefix, step, is_bad in (*((step_prefix(each), each, False) for each in steps), (FAULT, STEP, bad)):
        arrays[f"{prefix}.labels"], arrays[f"{prefix}.values"] = slots(step, rank, is_bad)
    return arrays


def site(rank: int) -> Site:
    """Where the fault began."""
    evidence = Evidence((8, 128, 1024), "float16", 0, 17, 0, 8 * 128 * 1024, 65504.0, (3, 0, 12))
    return Site(rank, STEP, 0, Phase.FORWARD, layer(FIRST_BAD_LAYER), 1, "output", "inf", evidence=evidence)


def wide_dump(root: Path, world_size: int = 512, bad_ranks: tuple[int, ...] = (37, 38, 301)) -> Path:
    """A dump of many ranks: one is written as ever, the others are copies with their own number, host and history."""
    origin = site(bad_ranks[0])
    operator = FirstOperator(origin.rank, "aten.mm.default", "/job/<b>model</b>.py:12 in Net.forward", "return a @ b")
    look = SecondLook("same", f"same on all {world_size} ranks: deterministic", operator)
    found = dataclasses.replace(
        report(STEP, world_size),
        origin=origin,
        sites=tuple(dataclasses.replace(origin, rank=rank) for rank in bad_ranks),
        num_ranks_affected=len(bad_ranks),
        ranks_affected=bad_ranks,
        cause="overflow: 17 products above 65504, the largest float16",
        unchecked=("layers inside a scripted module: head",),
        second_look=look,
    )
    first = history(0, range(STEP - 12, STEP), bad=False)
    path = write_dump(
        request(root, step=STEP, report=found, history=first, group=None, world_size=world_size, replica_index=0)
    ).path
    dump = Path(path)
    for rank in range(world_size):
        _give_rank(dump, rank, bad_ranks)
    return dump


def _give_rank(dump: Path, rank: int, bad_ranks: tuple[int, ...]) -> None:
    directory = dump / rank_name(rank)
    if rank:
        directory.mkdir()
        for name in (EVIDENCE, FILES_JSON, "window.json", "window.safetensors"):
            shutil.copyfile(dump / rank_name(0) / name, directory / name)
    evidence = json.loads((directory / EVIDENCE).read_text())
    device = {"type": "cuda", "index": rank % 8, "name": "NVIDIA H200", "uuid": f"GPU-{rank}"}
    sites = [site(rank).to_dict()] if rank in bad_ranks else []
    dtypes = {f"{layer(0)}.weight": "float16"}
    own = {"rank": rank, "host": f"node-{rank // 8:03d}", "device": device, "sites": sites, "dtypes": dtypes}
    (directory / EVIDENCE).write_text(json.dumps(evidence | own))
    (directory / FILES_JSON).write_text(json.dumps(json.loads((directory / FILES_JSON).read_text()) | {"rank": rank}))
    steps = range(STEP - 12, STEP) if rank in bad_ranks else range(0)
    np.savez(directory / HISTORY, **history(rank, steps, rank in bad_ranks))


def edited(dump: Path, **changes: object) -> Path:
    """The dump with other values in its manifest."""
    manifest = json.loads((dump / MANIFEST).read_text())
    (dump / MANIFEST).write_text(json.dumps(manifest | changes))
    return dump


def packed_in(page: str, name: str) -> str:
    """What a page holds packed under a name."""
    return page.partition(f'id="packed-{name}">')[2].partition("<")[0]


def unpacked(page: str, name: str) -> str:
    """The same, unpacked."""
    return gzip.decompress(base64.b64decode(packed_in(page, name))).decode()
