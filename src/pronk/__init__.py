"""pronk: a LLaMA engine. The public names load lazily, so that `import pronk` costs nothing."""

from __future__ import annotations

TYPE_CHECKING = False  # typing's, which takes a while to import
if TYPE_CHECKING:
    from typing import Any

    from pronk.checkpoint.hub.upload import push
    from pronk.config import ModelConfig
    from pronk.engine.params import SamplingParams
    from pronk.grammar.structure import Structure
    from pronk.llm import LLM
    from pronk.loading import load
    from pronk.train.runs import dpo, finetune, grpo, kto, pretrain, reward

__version__ = "0.1.0"
__all__ = [
    "LLM", "ModelConfig", "SamplingParams", "Structure", "__version__", "dpo", "finetune", "grpo", "kto", "load",
    "pretrain", "push", "reward",
]  # fmt: skip

_HOMES = {
    "LLM": "pronk.llm",
    "load": "pronk.loading",
    "ModelConfig": "pronk.config.model_config",
    "SamplingParams": "pronk.engine.params",
    "Structure": "pronk.grammar.structure",
    "finetune": "pronk.train.runs",
    "dpo": "pronk.train.runs",
    "grpo": "pronk.train.runs",
    "kto": "pronk.train.runs",
    "pretrain": "pronk.train.runs",
    "push": "pronk.checkpoint.hub.upload",
    "reward": "pronk.train.runs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pronk' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
