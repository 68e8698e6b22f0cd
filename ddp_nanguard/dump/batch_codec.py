"""Batches of any structure as JSON plus tensors, and back. Containers become tagged plain types; nothing is pickled.

JSON values are written as they are; everything else is an object whose ``$`` names its kind. A dict whose keys are all
strings, none of them ``$``, is written as it is too.
"""

from __future__ import annotations

from .batch_pack import Packed, pack
from .batch_unpack import Types, UnregisteredObject, unpack, unregistered_type

__all__ = ["Packed", "Types", "UnregisteredObject", "pack", "unpack", "unregistered_type"]
