"""How large a structure may be, which is looked up before anything is made of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pronk import strict_json
from pronk.errors import BadFile, BadRequest
from pronk.grammar import keywords
from pronk.grammar.structure import Structure

MAX_BYTES = 256 << 10
_MOST_VALUES = 20_000  # of a schema: keywords, members of enums and all else
_MOST_PROPERTIES = 1_000  # of one object; 10,000 take llguidance 3.5 s
_MOST_CHOICES = 10_000  # of an enum, a list of types or alternatives
_LARGEST_COUNT = 1_000_000  # of items, characters, properties
_DATA = ("const", "default", "enum", "examples", "properties")  # whose members are no keywords
_CONTROL = re.compile("[\0-\x07\x0b\x0e-\x1f]")  # of which JSON has no escape but by number
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")


def check(structure: Structure) -> None:
    """Raises BadRequest, which names the bound."""
    size = len(structure.source.encode())
    if size > MAX_BYTES:
        raise BadRequest(f"the {structure.kind} takes {size} bytes, and at most {MAX_BYTES} are taken")
    if not structure.source.strip():
        raise BadRequest(f"the {structure.kind} is empty")
    if structure.kind == "choice" and (count := len(json.loads(structure.source))) > _MOST_CHOICES:
        raise BadRequest(f"the choice is of {count} texts, and at most {_MOST_CHOICES} are taken")
    if structure.kind == "json_schema":
        try:
            schema = strict_json.parse(structure.source.encode(), Path("the schema"))
        except BadFile as error:
            raise BadRequest(str(error)) from None
        _check_schema(schema)
        keywords.check(schema)


def _check_least(schema: dict[str, Any]) -> None:
    """Of keys that are not declared one may be drawn twice, and count once."""
    least, declared = schema.get("minProperties"), schema.get("required")
    known = len(declared) if isinstance(declared, list) else 0
    if not isinstance(least, int) or least <= known:
        return
    if schema.get("additionalProperties") is not False or "patternProperties" in schema:
        raise BadRequest(
            f"minProperties of {least} cannot be kept where keys are free; name as many in required, or allow no "
            "additionalProperties"
        )


def _check_schema(schema: dict[str, Any]) -> None:
    left: list[tuple[str, Any]] = [("", schema)]
    for count in range(_MOST_VALUES + 1):
        if not left:
            return
        if count == _MOST_VALUES:
            raise BadRequest(f"the schema is of more than {_MOST_VALUES} values")
        name, value = left.pop()
        for text in (name, value) if isinstance(value, str) else (name,):
            if found := _CONTROL.search(text):
                raise BadRequest(f"the schema has a U+{ord(found[0]):04X}, a control character that no text may spell")
        if isinstance(value, dict):
            if name not in _DATA:
                _check_least(value)
            if len(value) > _MOST_PROPERTIES:
                raise BadRequest(f"an object of the schema has {len(value)} members, and may have {_MOST_PROPERTIES}")
            left += value.items()
        elif isinstance(value, list):
            if len(value) > _MOST_CHOICES:
                raise BadRequest(f"{name!r} of the schema lists {len(value)} values, and may list {_MOST_CHOICES}")
            left += [(name, item) for item in value]
        elif name in _COUNTS and isinstance(value, int | float) and abs(value) > _LARGEST_COUNT:
            raise BadRequest(f"{name} of the schema is {value}, and may be {_LARGEST_COUNT}")
