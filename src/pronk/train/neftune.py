"""NEFTune (arXiv 2310.05914): noise on embeddings in training, so that answers are learned less by heart.

    x + alpha / sqrt(L C) * u,      u [L, C] uniform from -1 to 1, of a text of L tokens and embeddings of C numbers

It is drawn from torch's random numbers, as dropout is: checkpoints have their state, and a resumed run draws the same.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pronk.torch_engine.batch import TorchBatch
from pronk.torch_engine.model import Llama


def add(model: Llama, alpha: float) -> None:
    """To `model`, in training and where a gradient is wanted: what a reference or a sampler asks stays exact."""

    def with_noise(x: Tensor, batch: TorchBatch) -> Tensor:
        """x [T, C]. The last text's length has what a pass is filled up with. A prompt that is read once for several
        answers has noise of its own length, and each answer that of both together."""
        if not (model.training and torch.is_grad_enabled()):
            return x
        lengths = np.array([run.end - run.begin for run in batch.runs])
        whole = lengths + np.array([run.start for run in batch.runs])
        scale = np.repeat(alpha / np.sqrt(whole * x.shape[1]), lengths).astype(np.float32)  # [T]
        noise = torch.empty_like(x, dtype=torch.float32).uniform_(-1, 1)
        return x + noise.mul_(torch.from_numpy(scale).to(x.device)[:, None]).to(x.dtype)

    model.with_noise = with_noise
