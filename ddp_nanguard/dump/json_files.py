"""Reads the JSON of a dump strictly: a damaged or forged file ends in a `DumpError`, never in a traceback.

Refused are files above a size, bytes that are not UTF-8, NaN and Infinity, duplicate keys, values that are nested too
deeply, and anything but an object at the top.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from ddp_nanguard.errors import DumpError

MAX_JSON_BYTES = 64 * 2**20
"""Largest manifest or file list of a rank. An entry of a file or tensor takes about 150 bytes, so there is room for
400,000 of them: twice as many as a model of 10**12 parameters has with its optimizer."""
MAX_CONTENT_BYTES = 512 * 2**20
"""Largest JSON file with content of users: texts of a batch, plain state of optimizers, tensors of a rank."""
MAX_JSON_DEPTH = 256
"""Packed batches are at most 64 containers deep (`batch_pack.MAX_DEPTH`), each of which takes up to three levels."""

AGAIN = "copy the dump again from where it was written"


def read_json(root: Path, path: str, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a JSON file whose top is an object.

    Args:
        root: the dump.
        path: of the file in it.
        max_bytes: longer files are refused without being read.

    Raises:
        DumpError: it is missing, or refused.
    """
    file = root / path
    data = _bytes_of(file, max_bytes)
    try:
        return parse_json(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        what = f"byte {error.start} is no UTF-8"
    except ValueError as error:
        what = str(error)
    raise DumpError(f"{file} is no valid JSON ({what}); {AGAIN}")


@contextlib.contextmanager
def well_formed(path: Path) -> Iterator[None]:
    """Turn errors that occur while a file's content is used into a `DumpError` that names the file."""
    try:
        yield
    except DumpError as error:
        if str(path.parent) in str(error):
            raise
        raise DumpError(f"{path}: {error}") from error
    except Exception as error:  # a damaged file can raise anything
        line = (str(error).splitlines() or [""])[0][:200]
        cause = f"{type(error).__name__}: {line}"
        raise DumpError(f"{path} is damaged ({cause}); {AGAIN}") from error


def _bytes_of(file: Path, max_bytes: int) -> bytes:
    try:
        if file.exists() and not file.is_file():
            raise DumpError(f"{file} is no regular file; {AGAIN}")  # a pipe would be waited for without end
        with open(file, "rb") as stream:
            data = stream.read(max_bytes + 1)
    except FileNotFoundError:
        raise DumpError(f"{file} is missing: the dump is incomplete; copy it again from where it was written") from None
    except OSError as error:
        raise DumpError(f"{file} cannot be read: {error.strerror}; check its permissions and the disk") from None
    if len(data) > max_bytes:
        size_bytes = file.stat().st_size
        raise DumpError(f"{file} has {size_bytes} bytes, valid are at most {max_bytes}; {AGAIN}")
    return data


def parse_json(text: str) -> dict[str, Any]:
    """The object in a strict JSON text.

    Raises:
        ValueError: it is not strict JSON, too deep or not an object; one line.
    """
    try:
        value = json.loads(
            text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant, parse_float=_finite
        )
    except RecursionError:
        raise ValueError(_too_deep()) from None
    if not isinstance(value, dict):
        raise ValueError(f"an object is valid, not a {type(value).__name__}")
    _check_depth(value)
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise ValueError(f"key {key[:60]!r} is there twice")
        seen.add(key)
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:60]} is beyond the numbers of a float64")
    return value


def _check_depth(value: Any) -> None:
    level: Iterable[Any] = [value]
    for _ in range(MAX_JSON_DEPTH):
        level = [item for container in level for item in _items(container) if isinstance(item, (dict, list))]
        if not level:
            return
    raise ValueError(_too_deep())


def _items(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _too_deep() -> str:
    return f"nested deeper than {MAX_JSON_DEPTH} levels"
