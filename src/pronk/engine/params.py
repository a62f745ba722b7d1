"""SamplingParams: what a request asks of decoding, and whether it can be had."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np

from pronk.engine.filters import FILTER_NAMES, FILTERS, Filter
from pronk.engine.rng import RNGS, Rng, check_seed
from pronk.errors import BadRequest, ContextOverflow
from pronk.spellings import ours

# name: what is allowed, in words and as a test. NaN fails every comparison.
_NUMBERS: dict[str, tuple[str, Callable[[float], bool]]] = {
    # Far outside these bounds a float32 logit divided by the temperature, or by the penalty, is no longer a number.
    "temperature": ("0 (greedy) or from 0.0001 to 10000", lambda x: x == 0 or 1e-4 <= x <= 1e4),
    "repetition_penalty": ("from 0.0001 to 100 (1 is off)", lambda x: 1e-4 <= x <= 100),
    "presence_penalty": ("from -2 to 2", lambda x: -2 <= x <= 2),
    "frequency_penalty": ("from -2 to 2", lambda x: -2 <= x <= 2),
    "length_penalty": ("from -5 to 5", lambda x: -5 <= x <= 5),
    **{filter_.name: filter_.allowed for filter_ in FILTERS if filter_.allowed},
}
_LARGEST = (1 << 31) - 1
_MOST_SAMPLES = 1 << 16  # of one request, each of which takes a little memory from the start
_SAMPLES = ("num_samples", "n", "num_return_sequences")  # names of the same thing
_INTEGERS: dict[str, tuple[int, int, str]] = {  # name: least, most, and what else there is
    "max_new_tokens": (1, _LARGEST, ", or -1 (to the end of the context)"),
    **dict.fromkeys(_SAMPLES, (1, _MOST_SAMPLES, "")),
    "num_beams": (1, _LARGEST, ""),
    **{filter_.name: (int(filter_.off), _LARGEST, "") for filter_ in FILTERS if not filter_.allowed},
}

# "cancelled": by who asked for it. "error": it could not go on.
FinishReason = Literal["stop", "length", "cancelled", "error"]
Speculative = Literal["ngram"]


@dataclass(frozen=True)
class SamplingParams:
    """What a request asks of decoding; every field is checked, and two that contradict each other are refused by name.

    `n` and, without beams, `num_return_sequences` are other names of `num_samples` (`samples` is the number). `stop`
    strings are carried for the text layer. `logprobs=N` asks for the chosen token's log-probability and the N
    likeliest. Raises BadRequest.
    """

    max_new_tokens: int = 256  # -1 stands for the most there can be: to the end of the context
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and generated tokens, as transformers counts
    presence_penalty: float = 0.0  # over generated tokens, as OpenAI counts
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # of the random numbers, which greedy decoding draws none of
    rng: Rng = "philox"
    num_samples: int = 1
    n: int = 1
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    num_return_sequences: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    speculative: Speculative | None = None  # guess ahead, from the text so far; the tokens stay the same

    def __post_init__(self) -> None:
        if self.max_new_tokens == -1:
            self._settle("max_new_tokens", _LARGEST)
        for name, bounds in _INTEGERS.items():
            _check_integer(name, getattr(self, name), *bounds)
        for name, (allowed, holds) in _NUMBERS.items():
            value = getattr(self, name)
            if not _is_number(value) or not holds(value):
                raise BadRequest(f"{name} must be {allowed}, not {value!r}")
        if self.rng not in RNGS:
            raise BadRequest(f"rng must be one of {', '.join(RNGS)}, not {self.rng!r}")
        if self.seed is not None:
            check_seed(self.rng, self.seed)
        if self.speculative not in (None, *get_args(Speculative)):
            raise BadRequest(f"speculative must be {' or '.join(get_args(Speculative))}, not {self.speculative!r}")
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, 0)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise BadRequest(f"early_stopping must be true, false or 'never', not {self.early_stopping!r}")
        if not isinstance(self.ignore_eos, bool):
            raise BadRequest(f"ignore_eos must be true or false, not {self.ignore_eos!r}")
        self._settle("stop", _strings(self.stop))
        self._settle("stop_token_ids", _token_ids(self.stop_token_ids))
        self._settle("logit_bias", _biases(self.logit_bias))
        self._check_contradictions()

    @classmethod
    def of(cls, params: SamplingParams | None, options: Mapping[str, Any]) -> SamplingParams:
        """`params` (None: the defaults) with `options` by name. Raises BadRequest for names that no option has, too."""
        if params is not None and not isinstance(params, SamplingParams):
            raise BadRequest(
                f"params must be SamplingParams, not {type(params).__name__}; options can be given one by one"
            )
        known = [field.name for field in fields(cls)]
        if unknown := options.keys() - set(known):
            from difflib import get_close_matches

            close = get_close_matches(min(unknown), known, n=1)
            way_out = f"did you mean {close[0]}?" if close else "SamplingParams lists those there are"
            raise BadRequest(f"unknown option {min(unknown)!r}; {ours(min(unknown), python=True) or way_out}")
        return replace(params or cls(), **options)

    @property
    def samples(self) -> int:
        """How many sequences sampling returns."""
        return max(self.num_samples, self.n, self.num_return_sequences)

    @property
    def penalizes(self) -> bool:
        """Whether the tokens so far weigh on the next one."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @cached_property
    def filters(self) -> tuple[tuple[Filter, float], ...]:
        """Those that are on, in order, and what each is set to."""
        return tuple((f, value) for f in FILTERS if (value := getattr(self, f.name)) != f.off)

    @cached_property
    def asked(self) -> tuple[Any, ...]:
        """What decides a token, but for the text: as _native.Model.draw takes it."""
        return (
            float(self.temperature),
            *(getattr(self, name) for name in FILTER_NAMES),
            float(self.repetition_penalty),
            float(self.presence_penalty),
            float(self.frequency_penalty),
            np.fromiter(self.logit_bias.keys(), np.int32),
            np.fromiter(self.logit_bias.values(), np.float32),
            self.rng == "xorshift",
            -1 if self.logprobs is None else self.logprobs,
        )

    @property
    def takes_likeliest(self) -> bool:
        """Whether the logits' largest is all that is asked of them."""
        return self.temperature == 0 and self.logprobs is None and not (self.logit_bias or self.penalizes)

    def stop_ids(self, eos_ids: Collection[int]) -> frozenset[int]:
        """The tokens that end a sequence."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else frozenset(eos_ids))

    def check_prompt(self, prompt_ids: Sequence[int], vocab_size: int, max_tokens: int) -> None:
        """Raises ContextOverflow or BadRequest where a model of so many tokens cannot start from this prompt."""
        if not prompt_ids:
            raise BadRequest("the prompt has no tokens; give at least one, such as the BOS token")
        if len(prompt_ids) > max_tokens - 1:
            raise ContextOverflow(len(prompt_ids), max_tokens - 1)
        ids = {"the prompt": prompt_ids, "stop_token_ids": self.stop_token_ids, "logit_bias": self.logit_bias}
        for name, tokens in ids.items():
            for token in tokens:
                if not 0 <= token < vocab_size:
                    raise BadRequest(f"{name} has token {token}, but the model's are from 0 to {vocab_size - 1}")

    def _settle(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_contradictions(self) -> None:
        if self.num_beams == 1:
            asked = {name: value for name in _SAMPLES if (value := getattr(self, name)) > 1}
            if len(set(asked.values())) > 1:
                several = " and ".join(f"{name}={value}" for name, value in asked.items())
                raise BadRequest(f"{several} say how many samples, each another number; give one of them")
            if asked and self.temperature == 0:
                raise BadRequest(
                    f"{next(iter(asked))}={self.samples} gives the same text {self.samples} times, for temperature=0 "
                    "is greedy; give temperature=0.8 to draw samples, or num_beams to search for several texts"
                )
            self._refuse(("length_penalty", "early_stopping"), "means something in beam search only; give num_beams")
            if self.temperature == 0:
                self._refuse(FILTER_NAMES, "needs a temperature above 0; the default, 0, is greedy")
            return
        if self.num_return_sequences > self.num_beams:
            raise BadRequest(
                f"num_return_sequences={self.num_return_sequences} must not exceed num_beams={self.num_beams}"
            )
        for name in _SAMPLES[:2]:
            if getattr(self, name) > 1:
                raise BadRequest(
                    f"{name}={getattr(self, name)} contradicts num_beams={self.num_beams}; ask for num_return_sequences"
                )
        unheard = ("temperature", *FILTER_NAMES, "seed", "rng", "logprobs", "stop", "speculative")
        self._refuse(unheard, f"means nothing in beam search; leave it or num_beams={self.num_beams} out")

    def _refuse(self, names: tuple[str, ...], why: str) -> None:
        for name in names:
            if getattr(self, name) != getattr(type(self), name):  # the default
                raise BadRequest(f"{name}={getattr(self, name)!r} {why}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_integer(name: str, value: object, least: int, most: int = _LARGEST, more: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise BadRequest(f"{name} must be a whole number from {least} to {most}{more}, not {value!r}")


def _strings(value: Any) -> tuple[str, ...]:
    values = (value,) if isinstance(value, str) else value
    if not isinstance(values, list | tuple) or not all(isinstance(s, str) and s for s in values):
        raise BadRequest("stop takes strings that are not empty")
    return tuple(values)


def _token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise BadRequest(f"stop_token_ids must be token ids, not {value!r}")
    for token in value:
        _check_integer("stop_token_ids", token, 0)
    return tuple(value)


def _biases(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise BadRequest(f"logit_bias must be a mapping of token id to bias, not {value!r}")
    for token, bias in value.items():
        _check_integer("logit_bias token", token, 0)
        if not _is_number(bias) or not -100 <= bias <= 100:
            raise BadRequest(f"logit_bias of token {token} must be from -100 to 100, not {bias!r}")
    return dict(value)
