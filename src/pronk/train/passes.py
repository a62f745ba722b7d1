"""The passes of training over one text, each way that is to change no number: to be held against those that answer.

See pronk.measure.verify_training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pronk.checkpoint.adapter import LoraConfig
from pronk.checkpoint.tensors import Checkpoint
from pronk.torch_engine.backend import load_model, pick_device
from pronk.train import adapter as adapters
from pronk.train import lora
from pronk.train.data.examples import Example
from pronk.train.objectives.sft import SFT
from pronk.train.recompute import recompute

_DRAWN = LoraConfig(rank=4, alpha=8)  # where no adapter is named: one whose numbers are drawn
_SHARE = 0.1  # of a weight that such an adapter adds to it, or so


class Passes:
    """A model in float32 as a run has it, dropout off, and one text of T tokens.

    `passed` is called after each pass over the text.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        ids: Sequence[int],
        device: str,
        ctx_size: int,
        passed: Callable[[], None] = lambda: None,
    ) -> None:
        self._ids, self._device, self._passed = list(ids), pick_device(device), passed
        self.model = load_model(checkpoint, self._device, torch.float32, ctx_size=ctx_size)
        self.model.eval().requires_grad_(False)

    def logits(self, *, packed: bool = False) -> NDArray[np.float32]:
        """[T, V] by the run's way to them; `packed`: of the text in one micro-batch with two others."""
        ids = self._ids
        texts = [ids[::-1], ids, ids[1:] + ids[:1]] if packed else [ids]
        # With a token more, which is foretold and not read.
        batch = SFT().collate([_example([*text, text[0]]) for text in texts], self._device)
        own = slice(len(ids), 2 * len(ids)) if packed else slice(len(ids))
        hidden = self.model.hidden(batch.batch)[own]
        logits: NDArray[np.float32] = (hidden @ self.model.lm_head.weight.T).detach().cpu().numpy()
        self._passed()
        return logits

    def logits_without_adapter(self) -> NDArray[np.float32]:
        with lora.disabled(self.model):
            return self.logits()

    def learn(self) -> tuple[float, dict[str, Tensor]]:
        """The mean loss over the text, in nats a token, and its gradients."""
        self.model.zero_grad()
        objective = SFT()
        batch = objective.collate([_example(self._ids)], self._device)
        cost, _ = objective.loss(self.model, batch)
        (cost / batch.weight).backward()
        self._passed()
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        return float(cost.detach()) / batch.weight, gradients

    def adapt(self, adapter: Path | None, beside: Path) -> Path:
        """Put an adapter beside the weights; where None is named, one that is drawn, and written into `beside`."""
        if adapter is not None:
            adapters.load(self.model, adapter)
            self.model.eval()  # its layers, too
            return adapter
        lora.add(self.model, _DRAWN)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for _, layer in lora.layers(self.model):
                # Sums over the rank: products of numbers of variance a, and weights have one of 1 / K.
                size = (_SHARE / (layer.scale * (_DRAWN.rank * layer.size[1]) ** 0.5)) ** 0.5
                for matrix in (layer.lora_A, layer.lora_B):
                    matrix.copy_(size * torch.randn(matrix.shape, generator=generator))
        adapters.save(self.model, _DRAWN, "", beside)
        return beside

    def recompute(self) -> None:
        """From now on, activations are forgotten."""
        recompute(self.model, 1)


def apart(gradients: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> tuple[float, float]:
    """The largest difference, and the largest gradient."""
    differences = [(others[name] - gradient).abs().max() for name, gradient in gradients.items()]
    return float(torch.stack(differences).max()), max(float(gradient.abs().max()) for gradient in gradients.values())


def _example(ids: Sequence[int]) -> Example:
    return Example(np.asarray(ids, np.int32), np.arange(len(ids)) > 0)
