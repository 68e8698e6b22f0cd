"""What torchrun shows of a fault in its own summary: the text of the rank where it began, as the root cause."""

from __future__ import annotations

import contextlib
import json
import os
import time

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def tell_launcher(text: str, origin_rank: int | None) -> None:
    """Leave the text where torchrun looks for it; nothing without torchrun, and nothing where it cannot be written.

    torchrun takes the earliest failure for the root cause, in whole seconds. All ranks end in the same one, so that of
    the rank where the fault began is dated a second back.

    Args:
        text: of the fault, the same on all ranks.
        origin_rank: where it began; None where that is no single rank.
    """
    path = os.environ.get(_ERROR_FILE)
    if not path:
        return
    began_here = os.environ.get("RANK") == str(origin_rank)
    extra = {"py_callstack": text, "timestamp": str(int(time.time()) - began_here)}
    with contextlib.suppress(OSError), open(path, "w") as file:
        json.dump({"message": {"message": text, "extraInfo": extra}}, file)
