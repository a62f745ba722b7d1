"""Renderer: a process that runs chat templates, kept from one to the next, within a limit of time and one of memory.

It is started when the first template is compiled (about 60 ms, most of it for importing Jinja) and remembers what it
compiled; a render then costs a tenth of a millisecond besides its own work. sandbox.py is what it does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pronk.errors import BadRequest
from pronk.limited.process import MEMORY, SECONDS, LimitedProcess


class Renderer(LimitedProcess):
    def __init__(self, seconds: float = SECONDS, memory: int = MEMORY) -> None:
        super().__init__(Path(__file__).with_name("sandbox.py"), "the template", "chat templates", seconds, memory)

    def ask(self, source: str, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Compile a template, and with `given` render it: {"text": ...}, or {} where it was only compiled.

        What else may come: {"broken": problem of the template, "line": where}, {"refused": problem of what was given}.
        Raises BadRequest for variables that JSON cannot hold, and PronkError where no process can be started.
        """
        try:
            request = json.dumps([source, given], ensure_ascii=False, default=_plain)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRequest(f"a chat template takes what JSON can hold: {error}") from None
        return self.request(request)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"not {type(value).__name__}")


shared = Renderer()
