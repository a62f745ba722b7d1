"""The words of JSON Schema: one that is misspelt would otherwise be taken for a remark, and constrain nothing."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from pronk.errors import BadRequest, short

# Of drafts 4 to 2020-12 (https://json-schema.org/specification): those that hold schemas, by how they hold them,
_OF_NAMES = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_OF_SEVERAL = {"allOf", "anyOf", "oneOf", "prefixItems"}
_OF_ONE = {
    "items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "propertyNames",
    "contains", "contentSchema", "not", "if", "then", "else",
}  # fmt: skip
# those that hold other things and constrain,
_PLAIN = {
    "type", "enum", "const", "required", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    "minLength", "maxLength", "pattern", "format", "minItems", "maxItems", "uniqueItems", "minContains", "maxContains",
    "minProperties", "maxProperties", "dependencies", "dependentRequired", "$ref", "$dynamicRef", "$recursiveRef",
}  # fmt: skip
# and those that tell a reader something; others may stand there as well.
_REMARKS = {
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment",
    "$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "contentEncoding",
    "contentMediaType", "discriminator", "nullable", "externalDocs", "xml",
}  # fmt: skip
_CONSTRAINING = frozenset(_OF_NAMES | _OF_SEVERAL | _OF_ONE | _PLAIN)
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_NEAR = 0.84  # of difflib's ratio: minimun, requird, propertys, typ
_MOST_WORDS = 100  # unknown ones that are held against keywords: each takes some 50 us


def check(schema: dict[str, Any]) -> None:
    """Raises BadRequest for what is nearly a keyword, for a type that there is not, and for a schema that has none."""
    if schema and not any(word in _CONSTRAINING | _REMARKS or word.startswith("x-") for word in schema):
        raise BadRequest(f"the schema has no keyword of JSON Schema, only {short(next(iter(schema)))}; is it one?")
    left, unknown = [schema], set[str]()
    while left and len(unknown) < _MOST_WORDS:
        each = left.pop()
        _check_types(each.get("type", []))
        for word in each:
            if word in _CONSTRAINING | _REMARKS or word in unknown:
                continue
            unknown.add(word)
            if near := _meant(word):
                raise BadRequest(f"the schema has {short(word)}, which is no keyword; did you mean {near!r}?")
        left += _within(each)


def _check_types(given: Any) -> None:
    for name in given if isinstance(given, list) else [given]:
        if isinstance(name, str) and name not in _TYPES:
            near = get_close_matches(name, _TYPES, 1)
            way_out = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(_TYPES)}"
            raise BadRequest(f"the schema has the type {short(name)}, which JSON has not; {way_out}")


def _meant(word: str) -> str | None:
    """The keyword that it is nearly. Not of names that generators and makers of extensions choose: x-enum, ref, _type,
    types, which is a name for several."""
    if not word.isalpha() or len(word) > 30 or word.removesuffix("s") in _CONSTRAINING:
        return None
    alike = [known for known in _CONSTRAINING if known[0] == word[0]]
    return next(iter(get_close_matches(word, alike, 1, _NEAR)), None)


def _within(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for word, value in schema.items():
        found: list[Any] = []
        if word in _OF_NAMES and isinstance(value, dict):
            found = [*value.values()]
        elif (word in _OF_SEVERAL or word == "items") and isinstance(value, list):
            found = value
        elif word in _OF_ONE:
            found = [value]
        yield from (each for each in found if isinstance(each, dict))
