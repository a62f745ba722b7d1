"""generation_config.json: which tokens end a text, and the sampling that a model's makers advise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pronk import strict_json
from pronk.config.model_config import end_ids
from pronk.errors import BadFile, short

NAME = "generation_config.json"

# What changes the sampling, by the names that it has in SamplingParams too, and the type of each. The ranges are there.
ADVISED: dict[str, tuple[type, ...]] = {
    "temperature": (int, float),
    "top_k": (int,),
    "top_p": (int, float),
    "min_p": (int, float),
    "repetition_penalty": (int, float),
}
_FILTERS = ("top_k", "top_p", "min_p")  # of no use without a draw
# What would change it, and is not here; with the values at which it does not.
_ABSENT: dict[str, tuple[Any, ...]] = {
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
    "penalty_alpha": (0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "sequence_bias": ({}, []),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": ([],),
    "guidance_scale": (1,),
    "num_beams": (1,),
}


@dataclass(frozen=True)
class GenerationConfig:
    eos_ids: tuple[int, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)  # fields of SamplingParams; none where it says nothing
    absent: tuple[str, ...] = ()  # what it asks for and pronk does not have, as in "typical_p=0.9"


def read(folder: Path) -> GenerationConfig:
    """Of a folder; without the file, it says nothing. Raises BadFile."""
    path = folder / NAME
    if not path.is_file():
        return GenerationConfig()
    raw = strict_json.read(path)
    try:
        ids = end_ids(raw.get("eos_token_id"))
    except ValueError as error:
        raise BadFile(path, str(error)) from None
    asked = {key: raw[key] for key, off in _ABSENT.items() if raw.get(key) is not None and raw[key] not in off}
    return GenerationConfig(ids, _sampling(path, raw), tuple(f"{key}={short(value)}" for key, value in asked.items()))


def _sampling(path: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """`do_sample` decides where it is there; else a temperature or a filter means that there is to be a draw."""
    said: dict[str, Any] = {}
    for key, types in ADVISED.items():
        if (value := raw.get(key)) is None:
            continue
        if type(value) not in types:
            raise BadFile(path, f"must be a {'whole ' if types == (int,) else ''}number, not {short(value)}", field=key)
        said[key] = value
    draws = raw.get("do_sample")
    if draws is not None and not isinstance(draws, bool):
        raise BadFile(path, f"must be true or false, not {short(draws)}", field="do_sample")
    said["top_k"] = max(0, said.get("top_k", 0))  # -1 is "all" to some
    said = {key: value for key, value in said.items() if key != "top_k" or value}
    if draws is False or said.get("temperature") == 0:
        return {key: value for key, value in said.items() if key not in _FILTERS} | {"temperature": 0.0}
    if draws or any(key in said for key in _FILTERS):
        said.setdefault("temperature", 1.0)
    return said
