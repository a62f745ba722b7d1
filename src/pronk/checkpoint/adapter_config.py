"""adapter_config.json, as PEFT writes it for LoRA: what an adapter is, and which modules of the base model have it.

What it asks for and pronk has not (biases of LoRA's own, aLoRA, trained rows of the embedding, ...) is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pronk import strict_json
from pronk.checkpoint.module_patterns import Patterns
from pronk.errors import BadFile, BadRequest, ModelNotFound, Unsupported, short

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class LoraConfig:
    """An adapter that pronk trains: the same of every module. Names and meaning are PEFT's. `rslora`: divide alpha by
    sqrt(rank) instead of by rank (arXiv 2312.03732). `dora`: rows of the sum have lengths of their own (2402.09353)."""

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: tuple[str, ...] = TARGETS
    rslora: bool = False
    dora: bool = False

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise BadRequest(f"the rank of LoRA must be a whole number from 1 on, not {self.rank!r}")
        if not (isinstance(self.alpha, int | float) and math.isfinite(self.alpha) and self.alpha > 0):
            raise BadRequest(f"LoRA's alpha must be a positive number, not {self.alpha!r}")
        if not (isinstance(self.dropout, int | float) and 0 <= self.dropout < 1):
            raise BadRequest(f"LoRA's dropout must be from 0 to less than 1, not {self.dropout!r}")
        if unknown := [name for name in self.target_modules if name not in TARGETS]:
            raise BadRequest(f"LoRA has no target module {unknown[0]!r}; there are {', '.join(TARGETS)}")
        if not self.target_modules:
            raise BadRequest(f"LoRA needs target modules; there are {', '.join(TARGETS)}")

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


# Keys that say where an adapter comes from or how a program is to hold it: they change nothing of what it computes.
_HISTORY = frozenset(
    "auto_mapping base_model_name_or_path revision inference_mode peft_version task_type init_lora_weights "
    "runtime_config eva_config corda_config loftq_config megatron_core qalora_group_size lora_ga_config".split()
)
_EVERYWHERE = frozenset("peft_type r lora_alpha lora_dropout target_modules use_rslora use_dora".split())
# Of some modules only. The tensors have each module's numbers, so that of a tied head's adapter nothing else is asked.
_OF_SOME = frozenset(
    "rank_pattern alpha_pattern layers_to_transform layers_pattern exclude_modules modules_to_save bias "
    "ensure_weight_tying".split()
)
_NOTHING: tuple[Any, ...] = (None, False, "none", {}, [], "")

# How A and B may begin. Other ways (pissa, olora, corda, loftq, ...) take from the base model's weights what they
# begin with, and PEFT does so again whenever such an adapter is loaded: to the base as it is they do not belong.
_BEGINNINGS = (None, True, False, "gaussian", "orthogonal", "eva")
_ALL_LINEAR = "all-linear"
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_MOST_NAMES = 4096  # a model of 400B has 900 matrices


@dataclass(frozen=True)
class AdapterConfig:
    path: Path
    raw: Mapping[str, Any]
    usual: LoraConfig  # of modules that no pattern names; its target_modules say nothing
    ranks: Patterns
    alphas: Patterns

    @property
    def base(self) -> str:
        """The name of its base model; "" where it does not say."""
        base = self.raw.get("base_model_name_or_path")
        return base if isinstance(base, str) else ""

    @property
    def bias(self) -> str:
        """Which biases were trained: "none", "lora_only" (of modules with LoRA) or "all"."""
        return self.raw.get("bias") or "none"

    @property
    def ties(self) -> bool:
        """Whether embedding and head have the same LoRA, though only one of them be named."""
        return bool(self.raw.get("ensure_weight_tying"))

    def rank(self, module: str) -> int:
        return int(self.ranks.of(module, self.usual.rank))

    def scale(self, module: str) -> float:
        rank = self.rank(module)
        return float(self.alphas.of(module, self.usual.alpha)) / (math.sqrt(rank) if self.usual.rslora else rank)

    @property
    def saves_score(self) -> bool:
        """Whether it makes a reward model of its base."""
        return "score" in (self.raw.get("modules_to_save") or ())

    def saves(self, module: str) -> bool:
        """Whether modules_to_save names it, or what it is part of, by the end of a name ("norm": "input_layernorm")."""
        names, parts = self.raw.get("modules_to_save") or (), module.split(".")
        names = (names,) if isinstance(names, str) else tuple(names)
        return any(".".join(parts[: i + 1]).endswith(names) for i in range(len(parts)))

    def targets(self, modules: Iterable[str]) -> set[str] | None:
        """Which of the base model's matrices have LoRA. None where only expressions say it, which are never run: they
        are a stranger's, and the tensors tell as much."""
        raw = self.raw
        if raw["target_modules"] == _ALL_LINEAR:
            wanted: set[str] | None = set(TARGETS)
        else:
            wanted = _names(raw["target_modules"]) if isinstance(raw["target_modules"], list) else None
        excluded, saved = _names(raw.get("exclude_modules")), _names(raw.get("modules_to_save"))
        patterns = _names(raw.get("layers_pattern"))
        if isinstance(raw.get("exclude_modules"), str) and excluded:
            excluded = None  # an expression, of the whole name
        if wanted is None or excluded is None or saved is None or patterns is None:
            return None
        layers = raw.get("layers_to_transform")
        numbers = {layers} if type(layers) is int else set(layers or ())

        def has(module: str) -> bool:
            if _ends(module, excluded) or _inside(module, saved) or not _ends(module, wanted):
                return False
            return module in wanted or not numbers or _layer(module, patterns) in numbers

        return {module for module in modules if has(module)}

    def plain(self) -> LoraConfig:
        """For training, which goes on from adapters that are the same of every module. Raises Unsupported, BadFile."""
        for key in sorted(_OF_SOME):
            if (value := self.raw.get(key)) not in _NOTHING and not (key == "modules_to_save" and _is_score(value)):
                raise Unsupported(f"{self.path}: {key}={short(value)} is not supported in training")
        targets = self.raw["target_modules"]
        if not isinstance(targets, list):
            raise Unsupported(f"{self.path}: target_modules={short(targets)} is not supported; only a list of names is")
        usual, names = self.usual, tuple(sorted({name.rpartition(".")[2] for name in targets}))
        try:
            return LoraConfig(usual.rank, usual.alpha, usual.dropout, names, usual.rslora, usual.dora)
        except ValueError as error:
            raise BadFile(self.path, str(error)) from None


def read(folder: Path) -> AdapterConfig:
    """Raises BadFile, Unsupported and ModelNotFound."""
    path = folder / CONFIG
    if folder.is_file():
        raise ModelNotFound(f"{folder}: is a file; an adapter is the folder that holds {CONFIG} and {WEIGHTS}")
    if not folder.exists():
        raise ModelNotFound(f"{folder}: no such folder; an adapter is the folder that holds {CONFIG} and {WEIGHTS}")
    if not path.is_file():
        raise ModelNotFound(f"{folder}: no adapter in this folder; looked for {CONFIG}")
    raw = strict_json.read(path, paths=True)  # its base model's
    if (kind := raw.get("peft_type")) != "LORA":
        raise Unsupported(f"{path}: peft_type={short(kind)} is not supported; only LORA is")
    for key, value in raw.items():
        if key not in _EVERYWHERE | _HISTORY | _OF_SOME and value not in _NOTHING:
            raise Unsupported(f"{path}: {key}={short(value)} is not supported; merge the adapter with PEFT instead")
    if (begun := raw.get("init_lora_weights")) not in _BEGINNINGS:
        problem = f"init_lora_weights={short(begun)} is not supported, which changes the base model's weights"
        raise Unsupported(f"{path}: {problem}; save it with PEFT's path_initial_model_for_weight_conversion")
    _check_kinds(path, raw)
    rank, alpha, dropout = raw.get("r", 8), raw.get("lora_alpha", 8), raw.get("lora_dropout", 0.0)
    try:
        usual = LoraConfig(rank, alpha, dropout, rslora=raw.get("use_rslora") is True, dora=raw.get("use_dora") is True)
        for number in (raw.get("rank_pattern") or {}).values():
            LoraConfig(rank=number)
        for number in (raw.get("alpha_pattern") or {}).values():
            LoraConfig(alpha=number)
    except (ValueError, OverflowError) as error:
        raise BadFile(path, str(error)) from None
    ranks, alphas = (Patterns(path, key, raw.get(key) or {}) for key in ("rank_pattern", "alpha_pattern"))
    return AdapterConfig(path, raw, usual, ranks, alphas)


def read_config(folder: Path) -> tuple[LoraConfig, str]:
    """What training goes on from, and the name of its base model. Raises BadFile, Unsupported and ModelNotFound."""
    config = read(folder)
    return config.plain(), config.base


def _check_kinds(path: Path, raw: Mapping[str, Any]) -> None:
    targets = raw.get("target_modules")
    if not (isinstance(targets, str) and targets) and not _is_names(targets):
        raise Unsupported(f"{path}: target_modules={short(targets)} is not supported; names, or an expression, are")
    for key in ("exclude_modules", "layers_pattern", "modules_to_save"):
        value = raw.get(key)
        if value is not None and not isinstance(value, str) and not _is_names(value):
            raise BadFile(path, f"must be a list of names, not {short(value)}", field=key)
    for key in ("rank_pattern", "alpha_pattern"):
        if not isinstance(raw.get(key) or {}, dict):
            raise BadFile(path, f"must map names to numbers, not {short(raw[key])}", field=key)
    layers = raw.get("layers_to_transform")
    numbers = layers if isinstance(layers, list) else [layers]
    if layers is not None and not all(type(number) is int for number in numbers):
        raise BadFile(path, f"must be numbers of layers, not {short(layers)}", field="layers_to_transform")
    if (dora := raw.get("use_dora")) not in (None, False, True):
        raise BadFile(path, f"must be true or false, not {short(dora)}", field="use_dora")
    if (bias := raw.get("bias")) not in (None, "none", "lora_only", "all"):
        raise Unsupported(f"{path}: bias={short(bias)} is not supported; none, lora_only and all are")


def _is_names(value: object) -> bool:
    return isinstance(value, list) and len(value) <= _MOST_NAMES and all(isinstance(name, str) for name in value)


def _is_score(value: object) -> bool:
    """Whether it is what PEFT saves of a reward model, which it looks for under both names."""
    return isinstance(value, list) and {"score"} <= {*value} <= {"score", "classifier"}


def _names(value: str | list[str] | None) -> set[str] | None:
    """None where one is more than a name."""
    names = {value} if isinstance(value, str) and value else set(value or ())
    return names if all(map(_NAME.fullmatch, names)) else None


def _ends(module: str, names: set[str]) -> bool:
    """Whether it is one of them, or one of them is its end."""
    parts = module.split(".")
    return any(".".join(parts[i:]) in names for i in range(len(parts)))


def _inside(module: str, names: set[str]) -> bool:
    """Whether it is one of them, or part of one."""
    parts = module.split(".")
    return any(_ends(".".join(parts[: i + 1]), names) for i in range(len(parts)))


def _layer(module: str, patterns: Iterable[str]) -> int | None:
    """The number behind the first of the patterns that is there; without patterns, the first number."""
    for pattern in sorted(map(re.escape, patterns)) or [r"[^.]+"]:
        if found := re.search(rf"(?:^|\.){pattern}\.([0-9]+)\.", module):
            return int(found[1])
    return None
