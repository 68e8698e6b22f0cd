"""The dump of a fault: written by all ranks together (or by one alone), read without executing anything.

Read `records` and `rank_records` for its JSON, `names`, `files` and `format` for its files, then `write` and `read`;
`batch_codec` turns batches into JSON and tensors. What is here is imported when it is first asked for: `listing` and
`outline` need no torch.
"""

from typing import TYPE_CHECKING, Any

from ddp_nanguard.lazy import resolved

if TYPE_CHECKING:
    from .listing import DumpSummary, list_dumps
    from .read import Dump, open_dump
    from .request import DumpRequest, DumpResult
    from .write import write_dump

__all__ = ["Dump", "DumpRequest", "DumpResult", "DumpSummary", "list_dumps", "open_dump", "write_dump"]

__frame_role__ = "probe"  # see `hooks.frames`

_WHERE = {
    "Dump": "read",
    "DumpRequest": "request",
    "DumpResult": "request",
    "DumpSummary": "listing",
    "list_dumps": "listing",
    "open_dump": "read",
    "write_dump": "write",
}

if not TYPE_CHECKING:  # a type checker would take any name at all for one of this package

    def __getattr__(name: str) -> Any:
        return resolved(__name__, _WHERE, name)
