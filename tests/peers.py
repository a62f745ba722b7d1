"""transformers' LLaMA with given weights: the independent implementation that everyone trusts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from pronk.config import ModelConfig


def hugging_face(config: ModelConfig, weights: Mapping[str, NDArray]) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**config.to_dict(), attn_implementation="eager"))
    state = {name: torch.from_numpy(np.array(array, np.float32)) for name, array in weights.items()}
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval()
