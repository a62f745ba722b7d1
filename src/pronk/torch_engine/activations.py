"""What each product of a Llama module is fed, overheard by hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from pronk.torch_engine.model import Llama

Fed = dict[tuple[int, str], NDArray[np.float32]]

# One of those that are fed the same, in the order in which they are computed.
_PRODUCTS = {"self_attn.q_proj": "qkv", "self_attn.o_proj": "o", "mlp.gate_proj": "gate_up", "mlp.down_proj": "down"}


@contextmanager
def overheard(model: Llama) -> Iterator[Fed]:
    """While it holds: (layer, "qkv", "o", "gate_up" or "down") and (-1, "head") -> [T, K] of the latest pass."""
    seen: Fed = {}

    def hook(key: tuple[int, str]) -> Callable[[nn.Module, Any], None]:
        def hear(_: nn.Module, given: Any) -> None:
            seen[key] = given[0].detach().float().cpu().numpy()

        return hear

    places: list[tuple[nn.Module, tuple[int, str]]] = [(model.lm_head, (-1, "head"))]
    for number, layer in enumerate(model.model.layers):
        places += [(layer.get_submodule(path), (number, name)) for path, name in _PRODUCTS.items()]
    handles = [module.register_forward_pre_hook(hook(key)) for module, key in places]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
