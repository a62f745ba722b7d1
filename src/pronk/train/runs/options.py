"""What a training verb is given, or its function in Python, by the same names: checked, and made into Settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from pronk.errors import BadRequest, short
from pronk.formats import FLOATS, TRAINED, names
from pronk.system import expanded
from pronk.train.runs.duration import seconds
from pronk.train.runs.shared import Optimizer

if TYPE_CHECKING:
    from pronk.train.objectives.objective import Objective
    from pronk.train.pretrain import Shape
    from pronk.train.settings import Settings


class Rates(NamedTuple):
    """Learning rates where none is given."""

    lora: float
    full: float


# Of each objective. TRL's for all weights, but for rewards, where that is what suits LoRA (1e-4); for LoRA ten times
# that, as usual, and for DPO as in docs/preferences.md.
RATES = {
    "sft": Rates(lora=2e-4, full=2e-5),
    "dpo": Rates(lora=5e-5, full=1e-6),
    "kto": Rates(lora=5e-5, full=1e-6),
    "reward": Rates(lora=1e-4, full=1e-5),
    "grpo": Rates(lora=5e-5, full=1e-6),
}
# Adafactor's rate is a share of a weight's size (its root mean square) and not a length. 0.02 is a usual size: by 50
# times the number such weights step as far as AdamW's; LoRA's B, which begins as zeros, does not.
TIMES = {"adafactor": 50.0}
VOCABULARY = 512  # tokens of a new tokenizer
LOGS = ("tensorboard", "wandb")
_SHAPE = ("hidden", "layers", "heads", "kv_heads", "ctx_size")


@dataclass(frozen=True)
class How:
    """Of all options, what a run is not made of: how it is done, and where."""

    out: Path | None
    device: str | None
    threads: int | None
    resume: bool
    samples: int
    log_to: tuple[str, ...]
    max_time: float | None = None  # seconds
    samples_at: str = "ends"
    tokenizer: str | None = None
    token_cache: bool = False
    push_to_hub: str | None = None  # a repository
    private: bool = True


class Contradiction(BadRequest):
    """Options that contradict each other. `said` writes the message, given how an option is spelled."""

    def __init__(self, said: Callable[[Callable[[str], str]], str]) -> None:
        self.said = said
        super().__init__(said(str))


class _Rule(NamedTuple):
    allowed: str
    holds: Callable[[Any], bool]


def _or_none(rule: _Rule) -> _Rule:
    return _Rule(f"{rule.allowed}, or None", lambda value: value is None or rule.holds(value))


def _whole(least: int) -> _Rule:
    return _Rule(f"a whole number from {least} on", lambda value: type(value) is int and value >= least)


def _number(allowed: str, holds: Callable[[float], bool]) -> _Rule:
    return _Rule(f"a number {allowed}", lambda v: type(v) in (int, float) and math.isfinite(v) and holds(v))


def _one_of(*names: str) -> _Rule:
    return _Rule(f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names)


def _is_name(value: object) -> bool:
    return isinstance(value, str | PathLike) and fspath(value) != ""


def _are_names(value: object) -> bool:
    return _is_name(value) or (isinstance(value, Sequence) and len(value) > 0 and all(map(_is_name, value)))


def _are_fields(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(text, str) for pair in value.items() for text in pair)
    return isinstance(value, list | tuple) and all(isinstance(pair, str) for pair in value)


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _is_duration(value: object) -> bool:
    try:
        return isinstance(value, str | int | float) and seconds(value) > 0
    except ValueError:
        return False


_FLAG = _Rule("True or False", lambda value: isinstance(value, bool))
_NAME = _Rule("a name or a path that is not empty", _is_name)
_NAMES = _Rule("the name of a file or a dataset, or a list of such names", _are_names)
_SHARE = _number("from 0 to 1", lambda x: 0 <= x <= 1)
_PART = _number("from 0 to less than 1", lambda x: 0 <= x < 1)
_POSITIVE = _number("over 0", lambda x: x > 0)
_NOT_NEGATIVE = _number("from 0 on", lambda x: x >= 0)

RULES: dict[str, _Rule] = {
    **dict.fromkeys("model text separator".split(), _NAME),
    "push_to_hub": _or_none(_Rule("the name of a repository on the hub", lambda value: isinstance(value, str))),
    **dict.fromkeys(
        "out tokenizer chat_template from_adapter eval_data device early_stop_task".split(), _or_none(_NAME)
    ),
    **dict.fromkeys("skip_bad_records train_on_prompt full bucket gradient_checkpointing resume".split(), _FLAG),
    **dict.fromkeys("dynamic_sampling rslora dora token_cache private".split(), _FLAG),
    **dict.fromkeys("batch_size accumulate save_every hidden layers heads ctx_size".split(), _whole(1)),
    **dict.fromkeys("max_new_tokens num_iterations".split(), _whole(1)),
    **dict.fromkeys("recompute samples seed".split(), _whole(0)),
    **dict.fromkeys(
        "max_length lora_rank max_steps pack threads eval_every patience early_stop_limit vocab_size kv_heads".split(),
        _or_none(_whole(1)),
    ),
    **dict.fromkeys("epochs beta reward_timeout".split(), _POSITIVE),
    **dict.fromkeys("lr lora_alpha lora_plus_ratio neftune_alpha".split(), _or_none(_POSITIVE)),
    "max_time": _or_none(_Rule("a duration as 90m, 1h30m or a number of seconds, over 0", _is_duration)),
    **dict.fromkeys(
        "weight_decay clip center_rewards kl_coef importance_cap simpo_gamma desirable_weight "
        "undesirable_weight".split(),
        _NOT_NEGATIVE,
    ),
    "data": _NAMES,
    "fields": _Rule("a mapping from your records' keys to the names they are read as", _are_fields),
    "samples_at": _one_of("ends", "looks"),
    "too_long": _one_of("error", "cut", "skip", "split"),
    "instructions": _one_of("auto", "chat", "alpaca"),
    "loss_type": _Rule("the name of a loss", lambda value: isinstance(value, str)),  # objectives know theirs
    "reward": _Rule("a reward (file.py:function, exact, a reward model, ...), or a list of such", _are_names),
    "reward_weights": _Rule("a list of numbers, one of each reward", lambda value: all(map(_is_number, value))),
    "num_generations": _whole(2),
    "estimator": _one_of("grpo", "rloo"),
    "scale_rewards": _or_none(_one_of("group", "batch", "none")),
    "epsilon": _number("over 0 and less than 1", lambda x: 0 < x < 1),
    "epsilon_high": _or_none(_POSITIVE),
    "rollout": _one_of("engine", "exact"),
    "rollout_quantize": _one_of("auto", *names(engine="cpu")),
    "label_smoothing": _number("from 0 to less than 0.5", lambda x: 0 <= x < 0.5),
    "lora_dropout": _or_none(_PART),
    "target_modules": _or_none(_Rule("all-linear, or names of modules", _are_names)),
    "quantize": _or_none(_one_of("auto", *TRAINED)),
    "warmup": _SHARE,
    "schedule": _one_of("cosine", "linear", "constant"),
    "optimizer": _one_of(*get_args(Optimizer)),
    "precision": _or_none(_one_of(*FLOATS)),
    "eval_share": _PART,
    "log_to": _Rule(
        f"of {', '.join(LOGS)}, one or several",
        lambda value: value in ((), []) or (_are_names(value) and {*_words(value)} <= {*LOGS}),
    ),
}


def check(given: Mapping[str, Any]) -> None:
    """Raises BadRequest, which names the option."""
    for name, value in given.items():
        if not RULES[name].holds(value):
            raise BadRequest(f"{name} must be {RULES[name].allowed}, not {short(value)}")


def of_records(kind: type[Objective], given: Mapping[str, Any]) -> tuple[Settings, How]:
    """What makes a run on records, and how it is done. Raises BadRequest, and what a damaged adapter is refused with.

    `kind`: of the objective, whose fields are options of the verb.
    """
    from pronk.checkpoint.adapter import TARGETS, LoraConfig, read_config
    from pronk.train.settings import Settings

    options = {**given, **given.get("shared", {})}
    options.pop("shared", None)
    check(options)
    how = _how(options)
    full = options.pop("full")
    lora = {name: options.pop(f"lora_{name}") for name in ("rank", "alpha", "dropout")}
    lora["target_modules"] = targets = options.pop("target_modules")
    lora = {name: value for name, value in lora.items() if value is not None}
    lora |= {name: True for name in ("rslora", "dora") if options.pop(name)}
    if full and (lora or options["lora_plus_ratio"]):
        raise Contradiction(lambda o: f"{o('full')} trains all weights; leave the options of LoRA out")
    if targets:
        modules = tuple(name.strip() for part in _words(targets) for name in part.split(","))
        lora["target_modules"] = TARGETS if modules == ("all-linear",) else modules
    options["from_adapter"] = adapter = _text(options["from_adapter"])
    if adapter and not full:
        if lora.keys() - {"dropout"}:
            raise Contradiction(
                lambda o: f"{o('from_adapter')} has a rank, an alpha, a kind and modules of its own; leave these out"
            )
        own_config, _ = read_config(expanded(adapter))
        lora = {**asdict(own_config), "dropout": lora.get("dropout", 0.0)}
    _settle_computing(options, how.device)
    sources = _words(options["data"])
    options["data"] = sources[0] if len(sources) == 1 else sources
    options["fields"] = _pairs(options["fields"])
    options["skip_bad"] = options.pop("skip_bad_records")
    for name in ("model", "chat_template", "eval_data", "early_stop_task"):
        options[name] = _text(options[name])
    usual = RATES[kind.name]
    options["lr"] = options["lr"] or (usual.full if full else usual.lora) * TIMES.get(options["optimizer"], 1.0)
    own = {field.name: options.pop(field.name) for field in fields(kind)}
    return Settings(**options, objective=kind(**own), lora=None if full else LoraConfig(**lora)), how


def of_text(objective: Objective, given: Mapping[str, Any]) -> tuple[Settings, How, Shape, int | None, str]:
    """The same of a new model, then its shape, the size of its vocabulary where it gets a new one, and what parts
    documents. Raises BadRequest."""
    from pronk.train.pretrain import Shape
    from pronk.train.settings import Settings

    check(given)
    options = dict(given)
    how, size = _how(options), options.pop("vocab_size")
    if how.tokenizer and size:
        raise Contradiction(
            lambda o: f"{o('tokenizer')} names a vocabulary that is made already; leave {o('vocab_size')} out"
        )
    _settle_computing(options, how.device)
    separator, text = options.pop("separator"), _text(options.pop("text"))
    shape = Shape(**{name: options.pop(name) for name in _SHAPE})
    size = None if how.tokenizer else size or VOCABULARY
    for name in ("eval_data", "early_stop_task"):
        options[name] = _text(options[name])
    options["lr"] = options["lr"] or shape.usual_lr * TIMES.get(options["optimizer"], 1.0)
    pack = options["batch_size"] * (shape.ctx_size + 1)
    model = f"{shape} of {how.tokenizer or f'{size} tokens'}"
    assert text
    settings = Settings(model, text, lora=None, objective=objective, pack=pack, **options)
    return settings, how, shape, size, separator


def _how(options: dict[str, Any]) -> How:
    """Taken out of the options."""
    found = {field.name: options.pop(field.name) for field in fields(How) if field.name in options}
    found["out"] = None if found["out"] is None else expanded(found["out"])
    if (out := found["out"]) is not None and out.is_file():
        raise Contradiction(lambda o: f"{o('out')} is a folder, and {out} is a file; name another")
    found["max_time"] = None if found["max_time"] is None else seconds(found["max_time"])
    found["log_to"] = _words(found["log_to"])
    if found["log_to"]:
        from pronk.train import logs

        logs.check(found["log_to"])
    if found["push_to_hub"] is not None:  # hours before there is anything to push
        from pronk.checkpoint.hub import upload

        upload.check(found["push_to_hub"])
    return How(**found | {name: _text(found[name]) for name in ("device", "tokenizer")})


def _settle_computing(options: dict[str, Any], device: str | None) -> None:
    """Options that stand for others, and the precision that fits the device, in place."""
    from pronk.torch_engine.backend import pick_device

    if options.pop("gradient_checkpointing"):
        if options["recompute"] > 1:
            raise Contradiction(lambda o: f"{o('gradient_checkpointing')} is {o('recompute')} 1; give one of them")
        options["recompute"] = 1
    options["precision"] = options["precision"] or ("f32" if pick_device(device).type == "cpu" else "bf16")


def _text(name: Any) -> str | None:
    return None if name is None else fspath(name)


def _words(value: Any) -> tuple[str, ...]:
    """One name, or several, as several."""
    return (fspath(value),) if isinstance(value, str | PathLike) else tuple(map(fspath, value))


def _pairs(names: Any) -> tuple[str, ...]:
    return tuple(f"{theirs}={ours}" for theirs, ours in names.items()) if isinstance(names, Mapping) else tuple(names)
