"""A run's settings as its checkpoints hold them: a format with a version, in which runs of older versions go on.

One flat object: {"lr": 0.0002, "lora": true, "lora.rank": 16, "objective": "sft", "objective.train_on_prompt": false}.
What a file stands for is in it by its digest. A setting that an older run does not have is taken to be what that run
did: its default of the day that it was added.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from pronk.errors import BadFile, BadRequest, short
from pronk.train.settings import Settings

VERSION = 3  # goes up when a key gets another name or meaning, and what is older goes through a function as `_of_0_1`

# What settings that came after 0.1 were by default when they came: {"lora.dora": False}. Whatever their default
# becomes, of runs that do not have them this stays true.
ADDED: Mapping[str, Any] = {
    "fields": [],
    "from_adapter": None,
    "early_stop_task": None,
    "early_stop_limit": None,
    "lora.dora": False,
    "lora_plus_ratio": None,
    "neftune_alpha": None,
    "objective.simpo_gamma": 0.5,
}

# How long a run is, and what follows from it: it may become longer when it is resumed.
LENGTH = ("epochs", "max_steps", "eval_every")

# How long a reward may take: more of it lets a run go on that was stopped by one, and changes no number.
_FREE = ("objective.reward_timeout",)

DIGEST = "the SHA-256 of its "  # how keys begin that stand for what a file holds
NEW_MODEL = "a new LLaMA ("  # how `model` begins where that is made and not read
_OBJECTIVE = "objective"
_LONG = 60  # characters of a text, of which a message shows where it parts from another one
_VERBS = {"sft": "finetune", "pretraining": "pretrain"} | {name: name for name in ("dpo", "kto", "reward", "grpo")}
_KEYWORDS = {  # of settings that options call otherwise
    **{f"lora.{name}": f"lora_{name}" for name in ("rank", "alpha", "dropout")},
    **{f"lora.{name}": name for name in ("target_modules", "rslora", "dora")},
    "skip_bad": "skip_bad_records",
}
_RENAMED = {"rate": "lr", "decay": "weight_decay", "loss": "loss_type"}  # since version 0


def flat(settings: Settings) -> dict[str, Any]:
    """As they are saved."""
    found: dict[str, Any] = json.loads(json.dumps(dict(_each(settings))))
    return found


def check(
    raw: Mapping[str, Any], checkpoint: Path, settings: Mapping[str, Any], usual: Mapping[str, Any]
) -> dict[str, Any]:
    """`raw`: what `checkpoint` holds beside its tensors; `settings`: `flat`, with digests; `usual`: their `defaults`.

    Gives what it has of LENGTH, which may be other than now. Raises BadRequest where it was made with other settings,
    or by a pronk that has more of them, and BadFile.
    """
    version, before = raw.get("version", 0), raw.get("settings")
    if not isinstance(before, dict):
        raise BadFile(checkpoint, "required and absent", field="settings")
    if type(version) is not int or version < 0:
        raise BadFile(checkpoint, f"must be a whole number, not {short(version)}", field="version")
    if version == 0:
        before = _of_0_1(before)
    if version < 2:
        before = _of_1(before, settings)
    if problem := _difference(version, before, settings, usual):
        raise BadRequest(f"{checkpoint} {problem}, or begin in another folder")
    return {key: before.get(key, usual.get(key)) for key in LENGTH}


def _difference(version: int, before: Mapping[str, Any], now: Mapping[str, Any], usual: Mapping[str, Any]) -> str:
    """The first, and the way out; "" where there is none."""
    unknown = ", ".join(key for key in before if key not in now)
    way_out = "resume with the pronk that made it"
    if version > VERSION:
        more = f" ({unknown} among them)" if unknown else ""
        return f"has settings of version {version}{more}, and this pronk knows version {VERSION}; {way_out}"
    longer = any(before.get(key, usual.get(key)) != now.get(key) for key in LENGTH[:2])
    objective = [name for name in (_OBJECTIVE,) if name in now]  # first, for rates follow from it
    for key in (*objective, *now):
        new = now[key]
        if (old := before.get(key, ADDED.get(key, usual.get(key)))) == new or key in _FREE:
            continue
        if longer and key in LENGTH and (old is None or type(old) in (int, float)):
            continue
        if key.startswith(DIGEST):
            what = key.removeprefix(DIGEST)
            if version < 2 and now.get(_INSTRUCTIONS) == "auto" and what == "examples":
                return "was made with other examples; if it began with instruction records: --instructions alpaca"
            if version < 3 and what == "examples":
                return (
                    "was made with other examples: their file has changed, or it is a .txt or has tool calls, which "
                    "was read otherwise then; bring back what was read, or begin in another folder"
                )
            return f"was made with other {what}: what their name stands for has changed since; bring it back"
        return f"{_told(key, old, new)}; resume with the same"
    return f"was made with {unknown}, which this pronk does not know; {way_out}" if unknown else ""


def _told(key: str, old: Any, new: Any) -> str:
    """In the words of the options: those of the command line are found by a name with a value (cli/typed.py)."""
    if key == _OBJECTIVE and str(old) in _VERBS and new in _VERBS:  # or it is one of somebody's own
        return f"was made with pronk {_VERBS[str(old)]}, and this is pronk {_VERBS[new]}"
    if key == "lora":
        key, old, new = "full", not old, not new
    name = _KEYWORDS.get(key, key.removeprefix(f"{_OBJECTIVE}."))
    if old is None or old is False:
        return f"was made without {name}={short(new)}"
    if new is None or new is False:
        return f"was made with {name}={short(old)}, and now is without"
    before, now = _from_where_they_part(old, new), _from_where_they_part(new, old)
    return f"was made with {name}={short(before)}, and now it is {short(now)}"


def _from_where_they_part(value: Any, other: Any) -> Any:
    """Of a long text what another one does not begin with as well: a message would leave out just that."""
    if not isinstance(value, str) or not isinstance(other, str) or len(value) < _LONG:
        return value
    pairs = enumerate(zip(value, other, strict=False))
    parts = next((at for at, (a, b) in pairs if a != b), min(len(value), len(other)))
    word = value.rfind(" ", 0, parts)
    begin = max(value.rfind(" ", 0, max(word, 0)) + 1, parts - 20)  # the word before says what it is
    return f"...{value[begin:]}" if begin > 0 else value


def defaults(settings: Settings) -> dict[str, Any]:
    """What `flat` would be of the same kind of run with nothing else chosen."""
    found: dict[str, Any] = json.loads(json.dumps(dict(_each(settings, usual=True))))
    return found


def _each(settings: Any, begin: str = "", *, usual: bool = False) -> Iterator[tuple[str, Any]]:
    for field in fields(settings):
        key, value = begin + field.name, getattr(settings, field.name)
        if is_dataclass(value):
            yield key, getattr(value, "name", True)
            yield from _each(value, f"{key}.", usual=usual)
        elif not usual:
            yield key, value
        elif field.default is not MISSING:
            yield key, field.default


_INSTRUCTIONS = "objective.instructions"


def _of_1(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of version 1 had `chat_instructions`, true or false. False was the default, of runs without
    instructions too, so that it goes on as "auto" and as "alpaca": that the examples are the same their digest says."""
    found = dict(before)
    if (chat := found.pop("objective.chat_instructions", None)) is not None:
        usual = now.get(_INSTRUCTIONS) if now.get(_INSTRUCTIONS) in ("auto", "alpaca") else "alpaca"
        found[_INSTRUCTIONS] = usual if chat is False else "chat"
    return found


def _of_0_1(before: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of version 0: {"rate": ..., "lora": {"rank": ...}, "preference": None, "train_on_prompt": ..., ...}."""
    found = {_RENAMED.get(key, key): value for key, value in before.items()}
    lora, preference = found.pop("lora", None), found.pop("preference", None)
    of_sft = {name: found.pop(name, None) for name in ("train_on_prompt", "chat_instructions")}
    found["lora"] = isinstance(lora, dict) or None
    if isinstance(lora, dict):
        found |= {f"lora.{name}": value for name, value in lora.items()}
    if isinstance(preference, dict):
        found["objective"] = "dpo"
        found |= {f"objective.{_RENAMED.get(name, name)}": value for name, value in preference.items()}
    elif str(found.get("model")).startswith(NEW_MODEL):
        found["objective"] = "pretraining"
    else:
        found["objective"] = "sft"
        found |= {f"objective.{name}": value for name, value in of_sft.items()}
    return found
