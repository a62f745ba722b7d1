"""Options of training that transformers and TRL call otherwise: their names are told ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from typing import ParamSpec, TypeVar

from pronk.errors import BadRequest
from pronk.spellings import unexpected
from pronk.train.runs import recipe
from pronk.train.runs.shared import DEFAULTS, Shared

P = ParamSpec("P")
R = TypeVar("R")

# The command line takes them; Python names ours.
SAME = {
    "output_dir": "out",
    "no_token_cache": "token_cache",
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
    "use_rslora": "rslora",
    "use_dora": "dora",
    "loraplus_lr_ratio": "lora_plus_ratio",
    "neftune_noise_alpha": "neftune_alpha",
    "loss": "loss_type",
    "max_completion_length": "max_new_tokens",
    "clip_high": "epsilon_high",
    "center_rewards_coefficient": "center_rewards",
    "hidden_size": "hidden",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "ctx": "ctx_size",
    "max_position_embeddings": "ctx_size",
}


def named(function: Callable[P, R]) -> Callable[P, R]:
    """In the place of its `**shared` the function has the options of shared.py, with their defaults.

    Raises BadRequest, which names ours, for another library's keyword; TypeError, which names the nearest, for one of
    nobody's.
    """
    own = signature(function)
    parameters = [one for one in own.parameters.values() if one.kind is not Parameter.VAR_KEYWORD]
    shared = DEFAULTS if len(parameters) < len(own.parameters) else {}
    types = {name: known.__forward_arg__ for name, known in Shared.__annotations__.items()}
    parameters += [
        Parameter(name, Parameter.KEYWORD_ONLY, default=usual, annotation=types[name]) for name, usual in shared.items()
    ]
    taken = own.replace(parameters=parameters)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in (name for name in kwargs if name not in taken.parameters):
            if (ours := SAME.get(name)) in taken.parameters:
                raise BadRequest(f"{function.__name__}() has no {name}=; {ours}= is its name here")
            raise unexpected(function.__name__, name, taken.parameters)
        given = taken.bind(*args, **kwargs).arguments
        run = function(*args, **{**shared, **kwargs})
        usual = {name: one.default for name, one in taken.parameters.items()}
        run.recipe = function.__name__, recipe.words(given, usual)  # type: ignore[attr-defined]
        return run

    call.__signature__ = taken  # type: ignore[attr-defined]
    return call
