"""Trial: a structure is compiled in another process first, where what it takes of time and memory is bounded.

llguidance compiles most schemas in a millisecond; some hundreds of bytes can keep it busy for seconds all the same, and
its own limits, which count symbols and fuel, did not stop those (one was `oneOf` nested 12 deep). A thread that is at
it cannot be ended, and a native library that runs out of its stack takes everything with it. What passes here is
compiled again where it is used, at about the same cost.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from pronk.errors import BadRequest
from pronk.grammar.structure import Structure
from pronk.limited.process import LimitedProcess

SECONDS = 1.0  # of the processor

_KEYS = re.compile(r"Unimplemented keys: \[(.*?)\]")
_QUOTED = re.compile(r"\d+ \| ")  # a line of the source, shown once more
_process = LimitedProcess(Path(__file__).with_name("work.py"), "it", "structures", SECONDS)


def check(structure: Structure) -> None:
    """Raises BadRequest where it cannot be followed, or not within the limits; PronkError where no process starts."""
    answer = _process.request(json.dumps([structure.kind, structure.source]))
    if problem := answer.get("refused") or answer.get("broken"):
        raise BadRequest(refusal(structure, problem))


def refusal(structure: Structure, problem: str) -> str:
    """What llguidance says, in one line of its several, without what it adds for its own developers."""
    lines = [line.strip() for line in problem.replace("<non-verbose/>", "").splitlines()]
    said = " ".join(line for line in lines if line.strip(" ^") and not _QUOTED.match(line))
    said = _KEYS.sub(lambda found: f"not supported: {found[1]}".replace('"', "'"), said).replace(
        "NoExtensionBias", "no text can follow it, for it refers to itself without end"
    )
    if structure.kind == "grammar" and "missing field `grammars`" in said:
        said = "it is JSON, and no grammar; a JSON schema is given as json_schema (--json-schema)"
    return f"this {structure.kind} cannot be followed: {said[:600]}"
