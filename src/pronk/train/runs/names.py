"""Options of training that transformers and TRL call otherwise: their names are told ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeVar

from pronk.errors import BadRequest

P = ParamSpec("P")
R = TypeVar("R")

# The command line takes them; Python names ours.
SAME = {
    "output_dir": "out",
    "num_train_epochs": "epochs",
    "steps": "max_steps",
    "per_device_train_batch_size": "batch_size",
    "gradient_accumulation_steps": "accumulate",
    "learning_rate": "lr",
    "warmup_ratio": "warmup",
    "lr_scheduler": "schedule",
    "lr_scheduler_type": "schedule",
    "max_grad_norm": "clip",
    "optim": "optimizer",
    "eval_steps": "eval_every",
    "save_steps": "save_every",
    "report_to": "log_to",
    "lora_r": "lora_rank",
    "loss": "loss_type",
    "center_rewards_coefficient": "center_rewards",
    "hidden_size": "hidden",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "ctx": "ctx_size",
    "max_position_embeddings": "ctx_size",
}


def named(function: Callable[P, R]) -> Callable[P, R]:
    """Raises BadRequest, which names ours, for another library's keyword; TypeError for one of nobody's, as ever."""
    known = signature(function).parameters

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs.keys() - known:
            if (ours := SAME.get(name)) in known:
                raise BadRequest(f"{function.__name__}() has no {name}=; {ours}= is its name here")
        return function(*args, **kwargs)

    return call
