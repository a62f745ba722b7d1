"""run.yaml: what a run was asked for, in the words of its verb's options, which `--config` reads back.

What is as it is by default is left out; so is --resume, which is no part of a run. No option of training is a secret.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from pronk.errors import os_problem
from pronk.system import replacing
from pronk.train.rewards.names import spelled

FILE = "run.yaml"  # in the run's folder
_JOINED = ("fields", "target_modules", "reward_weights")  # whose values have commas between them
_WITHOUT = ("resume",)
_SWITCHED_OFF = {"token_cache": "no-token-cache", "private": "public"}  # what is True by default: the words for False
_ENDS = {"\x85", "\u2028", "\u2029"}  # of lines, to YAML, whose dumper would not escape them


def words(given: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """By the names of options. `given` and `usual`: by the names that Python has."""
    chosen = {name: value for name, value in given.items() if name not in _WITHOUT and value != usual.get(name)}
    off = {_SWITCHED_OFF[name]: True for name, value in chosen.items() if name in _SWITCHED_OFF and value is False}
    return off | {
        name.replace("_", "-"): _word(name, value)
        for name, value in chosen.items()
        if value is not None and name not in _SWITCHED_OFF
    }


def text(said: Mapping[str, Any]) -> str:
    """As YAML."""
    import yaml

    plain = str(yaml.safe_dump(dict(said), allow_unicode=True, sort_keys=False, width=1 << 20))
    if _ENDS.isdisjoint(plain):
        return plain
    return str(yaml.safe_dump(dict(said), sort_keys=False, width=1 << 20))


def write(folder: Path, verb: str, said: Mapping[str, Any], note: Callable[[str], None]) -> None:
    """`note` hears where it cannot be written: the run is worth more."""
    head = f"# pronk {verb} --config {FILE} --out FOLDER does this again; what is not here is as it is by default.\n"
    try:
        with replacing(folder / FILE) as fresh:
            fresh.write_text(head + text(said), encoding="utf-8", errors="backslashreplace", newline="\n")
    except OSError as error:
        note(f"{folder / FILE} cannot be written: {os_problem(error)}")


def _word(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return ",".join(f"{theirs}={ours}" for theirs, ours in value.items())
    if isinstance(value, list | tuple):
        each = [_word(name, one) for one in value]
        if name in _JOINED:
            return ",".join(map(str, each))
        return each[0] if len(each) == 1 else each
    if callable(value):
        return spelled(value)
    return fspath(value) if isinstance(value, PathLike) else value
