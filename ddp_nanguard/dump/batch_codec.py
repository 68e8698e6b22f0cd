"""Any batch as JSON plus tensors, and back: containers become plain types with a tag, nothing is ever pickled.

JSON values stand for themselves; everything else is an object whose ``$`` names its kind. A dict whose keys are all
strings, none of them ``$``, stands for itself too.
"""

from __future__ import annotations

from .batch_pack import Packed, pack
from .batch_unpack import Types, UnregisteredObject, unpack, unregistered_type

__all__ = ["Packed", "Types", "UnregisteredObject", "pack", "unpack", "unregistered_type"]
