"""Request: what a comparison was asked for, as it was said, and as the report keeps it to be gone on with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pronk.errors import BadRequest


@dataclass(frozen=True)
class Request:
    """What was asked for. None: not said; the default holds, or what the report that is gone on with began with."""

    model: str | None = None
    to: tuple[str, ...] | None = None
    against: str | None = None
    rounds: int | None = None
    prefill: tuple[int, ...] | None = None
    decode_tokens: int | None = None
    windows: int | None = None
    text: str | None = None  # a file
    techniques: bool | None = None
    tasks: tuple[str, ...] | None = None  # of lm-evaluation-harness
    loading: Mapping[str, Any] = field(default_factory=dict)  # options of pronk.load, those given alone

    def asdict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        lists = {name: _list(getattr(self, name)) for name in ("to", "prefill", "tasks")}
        return {**asdict(self), **lists, "loading": as_json(self.loading)}

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Request:
        """The inverse of `asdict`. Raises KeyError or TypeError where it is none."""
        loading = dict(saved["loading"])
        if "int8_threshold" in loading:  # a number, or "inf"
            loading["int8_threshold"] = float(loading["int8_threshold"])
        lists = {name: saved[name] and tuple(saved[name]) for name in ("to", "prefill", "tasks")}
        return cls(**{**saved, **lists, "loading": loading})

    def going_on_with(self, saved: Request) -> Request:
        """The saved one, if nothing that is said now contradicts it. Only techniques may be added."""
        for name in ("model", "to", "against", "rounds", "prefill", "decode_tokens", "windows", "text", "tasks"):
            now, then = getattr(self, name), getattr(saved, name)
            if now is not None and now != then:
                raise BadRequest(_differs(name, now, then))
        for name, now in self.loading.items():
            if now != saved.loading.get(name):
                raise BadRequest(_differs(name, now, saved.loading.get(name)))
        return replace(saved, techniques=self.techniques or saved.techniques)


def _differs(name: str, now: object, then: object) -> str:
    option = "--" + name.replace("_", "-") if name != "model" else "the model"
    before = "none" if name == "tasks" and then is None else _shown(then)
    return f"{option} is {_shown(now)} now, but the report was begun with {before}; leave it out to go on with that"


def _shown(value: object) -> str:
    if value is None:
        return "the default"
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def as_json(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same, with infinity, for which JSON has no number, as a word."""
    return {key: str(value) if value == math.inf else value for key, value in options.items()}


def _list(values: Sequence[Any] | None) -> list[Any] | None:
    return None if values is None else list(values)
