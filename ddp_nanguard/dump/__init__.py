"""The dump of a fault: written by all ranks together (or by one alone), read without executing anything.

Read `format` for what lies on disk, then `write` and `read`; `pack` turns batches into JSON and tensors.
"""

from .read import Dump, DumpSummary, list_dumps, open_dump
from .write import DumpRequest, DumpResult, write_dump

__all__ = ["Dump", "DumpRequest", "DumpResult", "DumpSummary", "list_dumps", "open_dump", "write_dump"]

__frame_role__ = "probe"  # see `hooks.frames`
