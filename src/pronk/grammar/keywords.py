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
_CONSTRAINING = sorted(_OF_NAMES | _OF_SEVERAL | _OF_ONE | _PLAIN)
_NEAR = 0.8  # of difflib's ratio: minimun, requird, typ; not enumNames


def check(schema: dict[str, Any]) -> None:
    """Raises BadRequest for what is nearly a keyword, and for a schema that has none."""
    if schema and not schema.keys() & ({*_CONSTRAINING} | _REMARKS):
        raise BadRequest(f"the schema has no keyword of JSON Schema, only {short(next(iter(schema)))}; is it one?")
    left = [schema]
    while left:
        each = left.pop()
        for word in each.keys() - _REMARKS - {*_CONSTRAINING}:
            if near := get_close_matches(word, _CONSTRAINING, n=1, cutoff=_NEAR):
                raise BadRequest(f"the schema has {short(word)}, which is no keyword; did you mean {near[0]!r}?")
        left += _within(each)


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
