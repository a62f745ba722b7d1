"""Forms: what a request asks for by response_format and its siblings, as a Structure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pronk.errors import BadRequest, short
from pronk.grammar.structure import Structure
from pronk.serve.failures import ApiError

if TYPE_CHECKING:
    from pronk.serve.requests import Sampling

# As vLLM has them, before and since 0.12 (`structured_outputs`), and llama.cpp's and SGLang's.
_MAKERS: dict[str, Callable[[Any], Structure]] = {
    "json": Structure.json_schema,
    "regex": Structure.regex,
    "grammar": Structure.grammar,
    "choice": Structure.choice,
}
_FIELDS = {f"guided_{kind}": kind for kind in _MAKERS} | {"json_schema": "json", "regex": "regex", "grammar": "grammar"}

FORMED = ("response_format", "structured_outputs", *_FIELDS, "tools", "text", "output_config")  # of all APIs


def asks_for_one(request: Sampling) -> bool:
    """Whether there is anything to be found by `form_of`, which takes the longer the more there is."""
    return any(getattr(request, name) is not None for name in ("response_format", "structured_outputs", *_FIELDS))


def form_of(request: Sampling) -> tuple[Structure | None, str]:
    """The form that texts are to have, None: none; and the field that asks for it. Raises ApiError, which names it."""
    found = {"response_format": _response_format(request.response_format)}
    for name, kind in _FIELDS.items():
        if (value := getattr(request, name)) is not None and (name, value) != ("grammar", ""):  # llama.cpp's for none
            found[name] = _made(name, kind, value)
    for kind, value in (request.structured_outputs or {}).items():
        if kind == "json_object" and isinstance(value, bool):
            found[f"structured_outputs.{kind}"] = Structure.json_object() if value else None
        elif kind not in _MAKERS:
            known = ", ".join([*_MAKERS, "json_object"])
            raise ApiError(400, f"structured_outputs has {known}; not {short(kind)}", "structured_outputs")
        elif value is not None:
            found[f"structured_outputs.{kind}"] = _made("structured_outputs", kind, value)
    forms = {name: form for name, form in found.items() if form}
    if len(set(forms.values())) > 1:
        first, second = list(forms)[:2]
        raise ApiError(400, f"{first} and {second} ask for two forms of one text; give one of them", second)
    return next(((form, name) for name, form in forms.items()), (None, ""))


def _response_format(given: Mapping[str, Any] | None) -> Structure | None:
    name = "response_format"
    if not given:
        return None
    if "type" not in given:
        raise ApiError(400, f"{name} has no type, which is text, json_object or json_schema", name)
    kind = given["type"]
    if kind == "text":
        return None
    if kind == "json_object":  # llama.cpp's form of it has a schema
        schema = given.get("schema")
        return Structure.json_object() if schema is None else _made(name, "json", schema)
    if kind == "json_schema":
        inner = given.get("json_schema", given)  # the flat form is the Responses API's
        if not isinstance(inner, Mapping) or not isinstance(inner.get("schema", {}), Mapping):
            raise ApiError(400, 'response_format must be {"type": "json_schema", "json_schema": {"schema": ...}}', name)
        schema = inner.get("schema")
        return Structure.json_object() if schema is None else _made(name, "json", schema)
    raise ApiError(400, f"response_format is of type text, json_object or json_schema; not {short(kind)}", name)


def _made(name: str, kind: str, value: Any) -> Structure:
    try:
        return _MAKERS[kind](value)
    except BadRequest as error:
        raise ApiError(400, f"{name}: {error}", name) from None
