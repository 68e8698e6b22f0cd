"""The groups of public failure cases, the ids of all cases, and those that cannot run here."""

from __future__ import annotations

import re

GROUPS = {
    "A": "one rank goes bad: lockstep, hangs",
    "B": "mixed precision, scaling, clipping",
    "C": "FSDP and other sharding",
    "D": "model",
    "E": "data",
    "F": "optimizer, EMA, checkpoints",
    "G": "legitimate non-finite values",
    "H": "compile, recompute, accumulation",
    "I": "replay and reproduction",
    "J": "hooks and checker mechanics",
    "K": "loop, state and communication",
}

_IDS = """
    A01 A02 A03 A05 A06 A08 A09 A11 A12 A13 A16 A17 A18 A20
    B01 B02 B03 B04 B07 B09 B10 B12 B13 B14
    C01 C02 C04 C05 C06 C08 C09 C10 C12 C13
    D01 D02 D03 D05 D06 D07 D09 D10 D11 D12 D14 D17 D19 D21
    E01 E02 E03 E05 E06 E08
    F01 F02 F04 F06 F07 F08 F10
    G02 G03 G04 G05 G07 G08 G09
    H01 H02 H03 H04 H05 H08
    I01 I03 I04 I05 I07 I08 I09 I10 I11 I12
    J01 J02 J03 J05 J07 J08 J09 J10 J12 J13 J14 J15
    K01 K02 K03 K04 K05 K06 K07 K08 K09 K10 K11 K12 K13 K14
"""

IDS = [line for line in _IDS.split() if line]

NOT_HERE: dict[str, tuple[str, str]] = {
    "C10": (
        "https://github.com/pytorch/pytorch/issues/104504",
        "needs a GPU: an assertion of sharded mixed precision there",
    ),
    "I08": (
        "https://github.com/pytorch/pytorch/issues/22586",
        "needs a second kind of device: the random streams of CPU and GPU differ",
    ),
    "I11": (
        "https://github.com/pytorch/pytorch/issues/86264",
        "needs a GPU: copies to the host that have not ended",
    ),
    "J12": (
        "https://github.com/pytorch/pytorch/pull/136486",
        "needs a GPU: an assert on the device, which ruins its context",
    ),
}
"""Id -> (source, why it cannot run here)."""

PARTLY_HERE = {
    "A17": "the run with thousands of ranks is not; what one rank writes and reads alone is",
    "B03": "half precision on a GPU is not; a scale that falls under its floor is",
    "C05": "the mixed dtypes of adapters on a GPU are not; that the settings are recorded is",
    "F08": "a launcher that counts repeated failures is not; the second dump beside the first is",
    "H02": "captured graphs need a GPU; a wrong compiler backend does not",
    "I09": "hardware that is broken is not; a fault that is gone in the replay is",
    "J07": "kernels of a GPU are not; the encoder's choice on a CPU is",
    "J15": "the trainer of another framework is not; a logger that repairs its loss is",
}
"""Id -> what of the public report is left out."""

_ID = re.compile(r"(?:^test_|\[|^)([A-K]\d\d)(?!\d)")


def id_of(name: str) -> str | None:
    """The case's id in the name of a test or of a parameter set."""
    found = _ID.findall(name)
    return found[-1] if found else None
