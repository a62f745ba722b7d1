"""What other programs call the things that pronk has: transformers, llama.cpp, llama2.c, Meta's scripts, vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from inspect import signature
from typing import NamedTuple, ParamSpec, TypeVar

from pronk.errors import BadRequest

P = ParamSpec("P")
R = TypeVar("R")

# Other names of the same thing: the command line takes them, Python names ours.
SAME = {
    "ckpt_dir": "model",
    "checkpoint_dir": "model",
    "model_path": "model",
    "model_name_or_path": "model",
    "pretrained_model_name_or_path": "model",
    "tokenizer_path": "tokenizer",
    "max_seq_len": "ctx_size",
    "max_model_len": "ctx_size",
    "n_ctx": "ctx_size",
    "n_threads": "threads",
    "max_gen_len": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "n_predict": "max_new_tokens",
    "steps": "max_new_tokens",
    "temp": "temperature",
    "topp": "top_p",
    "repeat_penalty": "repetition_penalty",
}


class Instead(NamedTuple):
    """What does here what another option does elsewhere."""

    option: str | None
    value: str | None = None
    note: str = "does that"


INSTEAD = {
    "load_in_8bit": Instead("quantize", "llm-int8"),
    "load_in_4bit": Instead("quantize", "q4"),
    "quantization_config": Instead("quantize", note="says in which format weights are held"),
    "device_map": Instead("device", note="is cpu, cuda or cuda:N; a model lies on one device"),
    "n_gpu_layers": Instead("device", "cuda", "puts the whole model there"),
    "torch_dtype": Instead("quantize", note="is f32, bf16 or f16"),
    "dtype": Instead("quantize", note="is f32, bf16 or f16"),
    "attn_implementation": Instead("attn", note="is flash or math"),
    "do_sample": Instead("temperature", note="over 0 samples, and 0 is greedy"),
    "max_length": Instead("max_new_tokens", note="counts the new tokens alone"),
    "max_batch_size": Instead(None, note="as many texts go side by side as fit; leave it out"),
    "use_cache": Instead(None, note="the KV cache is used unless --no-cache (cache=False in Python) says otherwise"),
    "trust_remote_code": Instead(None, note="no code of a repository is ever run; leave it out"),
    "use_auth_token": Instead(None, note="the hub's token is taken from the environment variable HF_TOKEN"),
    "cache_dir": Instead(None, note="HF_HOME and PRONK_HOME say where downloads go"),
}


def named_here(name: str) -> str | None:
    """The option of pronk's that does what another program's does; None where there is none, or nothing is known."""
    return _instead(name.lstrip("-").replace("-", "_")).option


def ours(name: str, *, python: bool = False) -> str | None:
    """In a few words, what pronk has in the place of another program's option; None where nothing is known of it."""
    name = name.lstrip("-").replace("-", "_")
    option, value, note = _instead(name)
    if option is None:
        return note if name in INSTEAD else None
    if python:
        return f"{option}={'' if value is None else repr(value)} {note}"
    return f"--{option.replace('_', '-')}{'' if value is None else ' ' + value} {note}"


def _instead(name: str) -> Instead:
    return INSTEAD.get(name, Instead(SAME.get(name), note="is its name here"))


def unexpected(function: str, keyword: str, known: Iterable[str]) -> TypeError:
    """Python's own, with the nearest that there is."""
    from difflib import get_close_matches

    close = get_close_matches(keyword, list(known), n=1, cutoff=0.75)
    way_out = f"; did you mean {close[0]}=?" if close else ""
    return TypeError(f"{function}() got an unexpected keyword argument {keyword!r}{way_out}")


def named(function: Callable[P, R]) -> Callable[P, R]:
    """Raises BadRequest, which names ours, for another program's keyword; TypeError, which names the nearest, for one
    of nobody's."""
    known = signature(function).parameters

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in (name for name in kwargs if name not in known):
            if way_out := ours(name, python=True):
                raise BadRequest(f"{function.__name__}() has no {name}=; {way_out}")
            raise unexpected(function.__name__, name, known)
        return function(*args, **kwargs)

    return call
