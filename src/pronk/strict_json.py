"""JSON from files that nobody vouches for: one object, bounded in size and depth, no key twice, finite numbers,
whole characters."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, NoReturn

from pronk.errors import BadFile, short

# The largest file of this kind in use takes 2 MB.
MAX_BYTES = 4 << 20
# Each takes some 100 bytes and a microsecond to parse.
_MAX_VALUES = 1 << 18
MAX_DEPTH = 32
_LONGEST_NUMBER = 40  # characters; Python would take quadratic time over a long one
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # an escape for half of a pair, or for one without


def half_character(value: Any, text: str | None = None) -> str | None:
    """What is wrong with `value` if a surrogate stands alone in it: JSON can spell those, and no text can hold them, so
    that whatever encodes it would fail. `text`: the JSON it was read from, where that is at hand, for it tells sooner.
    """
    if text is None or _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError as error:
            near = error.object[max(0, error.start - 20) : error.start + 20]
            return f"a lone surrogate, which is half of a character, in {short(near)}"
    return None


def finite(value: Any) -> Any:
    """For writing: what is no number in JSON (NaN, infinity) becomes null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def read(path: Path, *, paths: bool = False) -> dict[str, Any]:
    """The object that the file holds. Raises BadFile.

    `paths`: a path that is not UTF-8 may stand there, with surrogates for its bytes.
    """
    if not path.is_file():
        raise BadFile(path, "is not a regular file" if path.exists() else "is absent")
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    return parse(data, path, paths=paths)


def parse(data: bytes, path: Path, offset: int = 0, *, paths: bool = False) -> dict[str, Any]:
    """The object that `data`, found at `offset` of the file, holds. Raises BadFile."""
    if len(data) > MAX_BYTES:
        raise BadFile(path, f"JSON of more than {MAX_BYTES} bytes", offset=offset)
    # Commas and brackets in texts count as well, of which there are few.
    if sum(map(data.count, (b",", b"[", b"{"))) > _MAX_VALUES:
        raise BadFile(path, f"JSON of more than {_MAX_VALUES} values", offset=offset)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise BadFile(path, "is not UTF-8", offset=offset + error.start) from None

    def constant(name: str) -> NoReturn:
        raise BadFile(path, f"{name} is not JSON")

    def integer(digits: str) -> int:
        if len(digits) > _LONGEST_NUMBER:
            raise BadFile(path, f"a number of {len(digits)} digits")
        return int(digits)

    def real(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            raise BadFile(path, f"the number {digits:.40} is out of range")
        return value

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise BadFile(path, "stands in one object twice", field=f"key {short(twice)}")
        return value

    try:
        value = json.loads(
            text, parse_constant=constant, parse_int=integer, parse_float=real, object_pairs_hook=members
        )
    except json.JSONDecodeError as error:
        raise BadFile(path, f"not JSON: {error.msg}", offset=offset + len(text[: error.pos].encode())) from None
    except RecursionError:
        raise BadFile(path, "JSON nested too deeply") from None
    if not isinstance(value, dict):
        raise BadFile(path, "holds no JSON object", offset=offset)
    _check_depth(value, path)
    if not paths and (problem := half_character(value, text)):
        raise BadFile(path, f"holds {problem}", offset=offset or None)
    return value


def _check_depth(value: Any, path: Path) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise BadFile(path, f"JSON nested more than {MAX_DEPTH} deep")
