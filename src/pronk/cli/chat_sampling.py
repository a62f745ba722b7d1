"""Sampling of a chat: what was asked for by name, over what the model's makers advise, over what a chat needs."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import click

from pronk.errors import BadRequest
from pronk.spellings import SAME

if TYPE_CHECKING:
    from pronk.checkpoint.generation_config import GenerationConfig
    from pronk.engine.params import SamplingParams

# Where nobody says otherwise. Greedy answers of small models repeat themselves.
OWN = {"temperature": 0.7, "top_p": 0.95}

# What pronk.checkpoint.generation_config reads; a test holds the two together, so that --help need not import it.
ADVISED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class Sampling:
    """`given`: fields of SamplingParams that the user named. `options`: those of the command line, by their fields;
    what /set takes, and how it is read, is theirs.
    """

    def __init__(self, given: Mapping[str, Any], options: Mapping[str, click.Parameter]) -> None:
        self.given, self.options = dict(given), options
        self.advised: Mapping[str, Any] = {}
        self.params = self._params(self.given)

    def advise(self, generation: GenerationConfig) -> str:
        """Take what the model's makers advise; in words, who says how answers are drawn."""
        self.advised = generation.sampling
        try:
            self.params = self._params(self.given)
        except BadRequest as error:
            raise BadRequest(f"generation_config.json, or what is asked for beside it: {error}") from None
        if self.given.keys() & {*OWN, *self.advised}:
            return "as asked for"
        return "the model's generation_config.json" if "temperature" in self.advised else "the chat's default"

    def set(self, name: str, text: str) -> str:
        """Set one field to what `text` says, or back to its default; what it is then, in words. Raises BadRequest."""
        field = self.field(name)
        given = {key: value for key, value in self.given.items() if key != field}
        if text != "default":
            given[field] = self._read(field, text)
        try:
            params = self._params(given)
        except BadRequest as error:
            raise BadRequest(f"{error}; /set NAME default takes a setting back") from None
        before = self.params.temperature
        self.given, self.params = given, params
        drawn = "; answers are greedy now, which draws nothing" if before and not params.temperature else ""
        return f"{_spelled(field)} {self.shown(field)}{drawn}"

    def field(self, name: str) -> str:
        """The field that `name` spells. Raises BadRequest."""
        said = name.lstrip("-").replace("-", "_")
        if (field := SAME.get(said, said)) not in self.options:
            close = difflib.get_close_matches(_spelled(said), self.names(), n=1)
            way_out = f"did you mean {close[0]}?" if close else "/set lists what can, other options begin a chat"
            raise BadRequest(f"nothing called {name} can be set; {way_out}")
        return field

    def names(self) -> list[str]:
        return [_spelled(field) for field in self.options]

    def shown(self, field: str) -> str:
        return _shown(field, getattr(self.params, field))

    def table(self) -> list[tuple[str, str, str]]:
        """A row a field: its name, its value, and whose that is where it is not what `generate` has."""
        from pronk.engine.params import SamplingParams

        plain, rows = SamplingParams(), []
        for field in self.options:
            whose = "set" if field in self.given else "generation_config.json" if field in self.advised else "chat"
            differs = getattr(self.params, field) != getattr(plain, field)
            rows.append((_spelled(field), self.shown(field), whose if differs or field in self.given else ""))
        return rows

    def _params(self, given: Mapping[str, Any]) -> SamplingParams:
        """Who names a temperature of 0 wants plain greedy decoding: no advice, and no filters, which contradict it."""
        from pronk.engine.filters import FILTER_NAMES
        from pronk.engine.params import SamplingParams

        fields = {**({} if "temperature" in self.advised else OWN), **self.advised, **given}
        if not fields["temperature"]:
            if named := [name for name in FILTER_NAMES if name in given]:
                raise BadRequest(f"{_spelled(named[0])} needs a temperature above 0, for 0 is greedy and draws nothing")
            advised = {} if "temperature" in given else self.advised
            fields = {key: value for key, value in {**advised, **given}.items() if key not in FILTER_NAMES}
        return SamplingParams(**fields)

    def _read(self, field: str, text: str) -> Any:
        """As the command line reads it."""
        option = self.options[field]
        assert isinstance(option, click.Option)
        if option.is_flag:
            if text not in ("on", "off"):
                raise BadRequest(f"{_spelled(field)} is on or off, not {text!r}")
            return text == "on"
        context = click.Context(click.Command("set"), resilient_parsing=False)
        try:
            return option.process_value(context, [text] if option.multiple else text)
        except click.BadParameter as error:
            raise BadRequest(f"{_spelled(field)}: {error.message}") from None


def settable(command: click.Command) -> dict[str, click.Parameter]:
    from pronk.engine.params import SamplingParams

    known = {field.name for field in fields(SamplingParams)}
    return {option.name: option for option in command.params if option.name in known}


def _shown(field: str, value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, Mapping):
        return " ".join(f"{key}={one:g}" for key, one in value.items()) or "none"
    if isinstance(value, tuple):
        return " ".join(map(repr, value)) or "none"
    if value is None:
        return "random" if field == "seed" else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _spelled(field: str) -> str:
    return field.replace("_", "-")
