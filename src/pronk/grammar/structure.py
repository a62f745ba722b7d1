"""Structure: the form that a text is to have, as it is asked for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pronk.errors import BadRequest

Kind = Literal["json_schema", "regex", "grammar", "choice"]


@dataclass(frozen=True)
class Structure:
    """A form that a text is to have: `Structure.json_schema(...)` and its siblings make one. It can be a key of a dict.

    Raises BadRequest for what is no text, dict or model. Whether it can be followed is found when it is compiled
    (`LLM.grammar`).
    """

    kind: Kind
    source: str

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise BadRequest(f"a structure is one of {', '.join(get_args(Kind))}, not {self.kind!r}")
        if not isinstance(self.source, str):
            raise BadRequest(f"a {self.kind} is a text, not {type(self.source).__name__}")
        try:
            self.source.encode()
        except UnicodeEncodeError:
            raise BadRequest(f"the {self.kind} holds a lone surrogate, which is half of a character") from None

    @classmethod
    def json_schema(cls, schema: Any) -> Structure:
        """JSON that a JSON Schema describes. `schema`: a dict, the text of one, or a model of pydantic's."""
        if isinstance(schema, str | bytes):
            return cls("json_schema", _text(schema))
        for name in ("model_json_schema", "json_schema"):  # pydantic's BaseModel, and its TypeAdapter
            if callable(make := getattr(schema, name, None)):
                schema = make()
                break
        if not isinstance(schema, dict):
            raise BadRequest(f"a schema is a dict, JSON text or a pydantic model, not {type(schema).__name__}")
        try:
            return cls("json_schema", json.dumps(schema, ensure_ascii=False, separators=(",", ":")))
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRequest(f"the schema holds what JSON does not have: {error}") from None

    @classmethod
    def json_object(cls) -> Structure:
        """Any JSON object."""
        return cls("json_schema", '{"type":"object"}')

    @classmethod
    def regex(cls, pattern: str) -> Structure:
        """Texts that the whole of a regular expression matches, in the syntax of Rust's `regex`: no look-around."""
        return cls("regex", pattern)

    @classmethod
    def grammar(cls, grammar: str) -> Structure:
        """Texts of a context-free grammar, in llguidance's variant of Lark's syntax, from its rule `start` on."""
        return cls("grammar", grammar)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Structure:
        """One of several texts."""
        if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
            raise BadRequest("a choice is a list of texts, at least one")
        if not all(isinstance(choice, str) and choice for choice in choices):
            raise BadRequest("the texts of a choice are strings that are not empty")
        return cls("choice", json.dumps(list(choices), ensure_ascii=False))

    @classmethod
    def of(cls, schema: Any, structure: Structure | None) -> Structure | None:
        """What a caller has asked for in one of two ways; None where in neither."""
        if structure is not None and not isinstance(structure, Structure):
            raise BadRequest(f"structure must be a Structure, not {type(structure).__name__}; a schema goes in schema=")
        if schema is None:
            return structure
        if structure is not None:
            raise BadRequest("schema and structure contradict each other; give one of them")
        return cls.json_schema(schema)


def _text(schema: str | bytes) -> str:
    try:
        return schema if isinstance(schema, str) else schema.decode()
    except UnicodeDecodeError as error:
        raise BadRequest(f"the schema is not UTF-8 (byte {error.start})") from None
