"""How rewards are named: `exact`, `regex:^\\d+$`, `schema:FILE`, `length:40`, `file.py:function`, or a reward model."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from inspect import getsourcefile, unwrap
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

from pronk.errors import BadRequest, short
from pronk.system import expanded

BUILT = ("exact", "regex", "schema", "length")
_FUNCTION = re.compile(r"(.+\.py):([^\W\d]\w*)", re.DOTALL)
_FILE = re.compile(r".+\.py(?=:|$)", re.DOTALL)


class Named(NamedTuple):
    kind: str  # of BUILT, "function" or "model"
    of: str  # a key, a pattern, a file, a number; a function's name; a model's name or folder
    file: str = ""  # that a function is in


def parse(name: str) -> Named:
    """Raises BadRequest."""
    if found := _FUNCTION.fullmatch(name):
        return Named("function", found[2], found[1])
    kind, colon, of = name.partition(":")
    if kind not in BUILT:
        if found := _FILE.match(name):
            raise BadRequest(f"the reward {short(name)} names no function at the top level of a file: {found[0]}:NAME")
        if colon and (close := get_close_matches(kind, BUILT, n=1, cutoff=0.75)):
            raise BadRequest(f"there is no reward {short(kind)}; did you mean {close[0]}:{of}?")
        return Named("model", name)
    if kind == "exact":
        return Named(kind, of or "answer")
    if not (colon and of):
        wants = {"regex": "regex:PATTERN", "schema": "schema:FILE", "length": "length:TOKENS"}[kind]
        raise BadRequest(f"the reward {kind} is {wants}, not {short(name)}")
    if kind == "length" and not (of.isascii() and of.isdigit() and len(of) < 11 and 0 < int(of) < 1 << 31):
        raise BadRequest(f"the reward length is of a whole number of tokens from 1 on, not {short(of)}")
    if kind == "regex":
        try:
            re.compile(of)
        except (re.error, RecursionError, OverflowError) as error:
            raise BadRequest(f"the reward {short(name)} is no regular expression: {error}") from None
    return Named(kind, of)


def check_model(name: str) -> None:
    """Raises BadRequest where a reward that can only be a model is none that is here, that the hub may have, or that
    pronk knows by name: before anything is loaded."""
    from pronk.checkpoint.hub import known  # which takes its time, and --help has no use for it

    kind, of, _ = parse(name)
    if kind != "model" or expanded(of).exists() or known.name_of(of):
        return
    above, slash, last = of.rpartition("/")
    if not slash:
        close = get_close_matches(of, BUILT, n=1, cutoff=0.75)
        raise BadRequest(
            f"there is no reward {short(of)}; {f'did you mean {close[0]}? T' if close else 't'}here are exact, regex, "
            "schema and length, a function of your own (file.py:name), and reward models (a folder of pronk reward)"
        )
    on_hub = of.count("/") == 1 and above and last and above[0] not in ".~" and not expanded(above).is_dir()
    if not on_hub:
        raise BadRequest(f"there is no folder {short(of)}, which a reward model would be; pronk reward makes one")


def needed_keys(names: Sequence[str]) -> list[str]:
    """What the records need for them."""
    return [named.of for named in map(parse, names) if named.kind == "exact"]


def spelled(reward: str | Path | Callable[..., Any]) -> str:
    """A name; of a function of one's own "file.py:name". Raises BadRequest for one that no other process could find."""
    if not callable(reward):
        return str(reward)
    function, name = unwrap(reward), getattr(reward, "__qualname__", "")
    try:
        file = getsourcefile(function)
    except TypeError:
        file = None
    if not (file and file.endswith(".py") and name.isidentifier()):
        raise BadRequest(
            f"a reward runs in a process of its own, which cannot find {short(name or reward)}; put the function into "
            "a file, at its top level, and name it: reward='file.py:name'"
        )
    return f"{Path(file).resolve()}:{name}"


def labels(names: Sequence[str]) -> list[str]:
    """What each is called in the log; where two would be called the same, the later ones get a number."""
    found: list[str] = []
    for named in map(parse, names):
        label = {"function": named.of, "model": Path(named.of).name or named.of}.get(named.kind, named.kind)
        numbered = (f"{label}#{number}" for number in count(2))
        found.append(next(name for name in chain((label,), numbered) if name not in found))
    return found
