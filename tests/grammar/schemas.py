"""Thirty schemas of what people ask for: recursion, enums, patterns, bounds, unions, formats, unusual keys."""

from __future__ import annotations

from typing import Any


def closed(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    """An object with these members, all of them, and no others."""
    rest = {"required": list(properties), "additionalProperties": False, **more}
    return {"type": "object", "properties": properties, **rest}


_TEXT = {"type": "string", "maxLength": 12}
_TREE = closed({"value": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}})
_EXPRESSION = {
    "$defs": {
        "e": {
            "anyOf": [
                {"type": "number"},
                closed({"op": {"enum": ["+", "*"]}, "args": {"type": "array", "items": {"$ref": "#/$defs/e"}}}),
            ]
        }
    },
    "$ref": "#/$defs/e",
}

SCHEMAS: dict[str, dict[str, Any]] = {
    "person": closed({"name": _TEXT, "age": {"type": "integer", "minimum": 0, "maximum": 150}}),
    "optional members": {"type": "object", "properties": {"a": _TEXT, "b": {"type": "boolean"}, "c": {"type": "null"}}},
    "any object": {"type": "object"},
    "more members of a kind": {
        "type": "object",
        "properties": {"a": _TEXT},
        "additionalProperties": {"type": "integer"},
    },
    "tree": _TREE,
    "mutual recursion": {
        "$defs": {
            "a": closed({"b": {"anyOf": [{"$ref": "#/$defs/b"}, {"type": "null"}]}}),
            "b": closed({"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}),
        },
        "$ref": "#/$defs/a",
    },
    "linked list": closed({"head": {"type": "integer"}, "tail": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}),
    "expression": _EXPRESSION,
    "enum": closed({"colour": {"enum": ["red", "green", "blue"]}, "mixed": {"enum": [1, "1", None, True, {"a": [1]}]}}),
    "const": closed({"kind": {"const": "fixed"}, "version": {"const": 2}}),
    "pattern": closed({"phone": {"type": "string", "pattern": "^[0-9]{3}-[0-9]{4}$"}}),
    "pattern anywhere": closed({"code": {"type": "string", "pattern": "[A-Z][0-9]", "maxLength": 10}}),
    "pattern of letters": closed({"w": {"type": "string", "pattern": "^(ab|cd)+x?$"}}),
    "integer bounds": closed({"n": {"type": "integer", "minimum": -17, "maximum": 1234}}),
    "number bounds": closed({"x": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2.25}}),
    "multiples": closed({"n": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700}}),
    "text lengths": closed({"s": {"type": "string", "minLength": 3, "maxLength": 6}}),
    "item counts": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    "union of types": closed({"v": {"type": ["string", "integer", "null"], "maxLength": 8}}),
    "anyOf objects": {"anyOf": [closed({"cat": _TEXT}), closed({"dog": {"type": "integer"}})]},
    "oneOf by a tag": {
        "oneOf": [
            closed({"type": {"const": "circle"}, "r": {"type": "number", "minimum": 0}}),
            closed({"type": {"const": "box"}, "w": {"type": "integer"}, "h": {"type": "integer"}}),
        ]
    },
    "allOf": {"allOf": [closed({"a": _TEXT}, additionalProperties=True), {"required": ["a"], "maxProperties": 4}]},
    "nested arrays": {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
    "matrix": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}},
    "tuple": {"type": "array", "prefixItems": [_TEXT, {"type": "integer"}], "items": False, "minItems": 2},
    "date": closed({"d": {"type": "string", "format": "date"}, "t": {"type": "string", "format": "date-time"}}),
    "formats": closed({"id": {"type": "string", "format": "uuid"}, "ip": {"type": "string", "format": "ipv4"}}),
    "email": closed({"to": {"type": "string", "format": "email"}}),
    "unicode keys": closed({"naïve": _TEXT, "日本": {"type": "integer"}, 'quo"te\\n': {"enum": ["é", "😀"]}}),
    "pattern of keys": {
        "type": "object",
        "patternProperties": {"^x[0-9]$": {"type": "integer"}},
        "additionalProperties": False,
    },
}
assert len(SCHEMAS) == 30
