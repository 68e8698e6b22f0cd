"""The dump of a fault: written by all ranks together (or by one alone), read without executing anything.

Read `records` and `rank_records` for its JSON, `format` for its other files, then `write` and `read`; `batch_codec`
turns batches into JSON and tensors.
"""

from .listing import DumpSummary, list_dumps
from .read import Dump, open_dump
from .write import DumpRequest, DumpResult, write_dump

__all__ = ["Dump", "DumpRequest", "DumpResult", "DumpSummary", "list_dumps", "open_dump", "write_dump"]

__frame_role__ = "probe"  # see `hooks.frames`
