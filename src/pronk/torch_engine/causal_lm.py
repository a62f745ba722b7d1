"""CausalLM: a Llama whose forward pass is called as transformers' is, with texts side by side and labels.

Padding is left out of the batch before anything is computed: attention_mask says which tokens there are, and the runs
of a TorchBatch hold these alone, at the positions of their columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pronk.errors import BadRequest
from pronk.torch_engine.attention import attention_weights
from pronk.torch_engine.batch import Rows, TorchBatch
from pronk.torch_engine.model import Llama

IGNORED = -100  # a label that counts nothing, as torch and transformers have it


class CausalLMOutput(NamedTuple):
    loss: Tensor | None
    logits: Tensor  # [B, T, V]
    hidden_states: tuple[Tensor, ...] | None  # L + 1 of [B, T, C]: what each layer is given, then what the head is
    attentions: tuple[Tensor, ...] | None  # L of [B, H, T, T]: by query, then by key


class CausalLM(Llama):
    """Shares the modules of the Llama that it is made of, under their names, which are Hugging Face's."""

    def __init__(self, llama: Llama) -> None:
        nn.Module.__init__(self)
        self.config, self.model, self.lm_head = llama.config, llama.model, llama.lm_head
        self.every_row = llama.every_row

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> Tensor | CausalLMOutput:
        """input_ids [B, T] -> logits [B, T, V], or a CausalLMOutput where anything else is asked for.

        `attention_mask` [B, T]: 0 where padding stands, on either side; what comes out there is 0. `labels` [B, T]: the
        loss is the mean, over all texts, of -log p of each label given the tokens before its place; none counts at the
        first place of a text, at padding, and where it is -100. Raises BadRequest for other shapes.
        """
        given: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
        for name, tensor in given.items():
            if not isinstance(tensor, Tensor | None):
                way_out = "torch.tensor([ids]) is one, of a list of token ids"
                raise BadRequest(f"{name} must be a tensor [texts, tokens], not {type(tensor).__name__}; {way_out}")
            if tensor is not None and (tensor.ndim != 2 or tensor.shape != input_ids.shape or not tensor.numel()):
                shape = list(tensor.shape)
                raise BadRequest(f"{name} must be [texts, tokens], as large as input_ids, not empty; these are {shape}")
        if labels is not None and not _are_labels(labels, self.config.vocab_size):
            raise BadRequest(f"labels must be tokens from 0 to {self.config.vocab_size - 1}, or {IGNORED} for none")
        there = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        place = there.to(input_ids.device, torch.bool).nonzero(as_tuple=True)  # texts and columns of R tokens
        if not len(place[0]):
            raise BadRequest("attention_mask leaves no token of input_ids")
        batch = _batch(input_ids, place)
        inside = _Inside(input_ids.shape, place, batch, output_hidden_states, output_attentions)
        with inside.watched(self):
            last = self.hidden(batch)  # [R, C]
        logits = self.lm_head(last)  # [R, V]
        loss = None if labels is None else _loss(logits, labels.to(logits.device), place)
        spread = inside.spread(logits)
        if loss is None and not output_hidden_states and not output_attentions:
            return spread
        states = (*inside.states, inside.spread(last)) if output_hidden_states else None
        return CausalLMOutput(loss, spread, states, tuple(inside.weights) if output_attentions else None)


def _are_labels(labels: Tensor, vocab_size: int) -> bool:
    if labels.is_floating_point():
        return False
    return bool(((labels == IGNORED) | ((labels >= 0) & (labels < vocab_size))).all())


def _batch(ids: Tensor, place: tuple[Tensor, ...]) -> TorchBatch:
    texts, columns = place
    ends = torch.bincount(texts, minlength=len(ids)).cumsum(0).tolist()
    runs = tuple(Rows(begin, end, 0, None) for begin, end in zip([0, *ends], ends, strict=False) if end > begin)
    rows = torch.arange(len(texts), device=ids.device)
    return TorchBatch(ids[place].long(), columns, rows, runs, None, ids.shape[1] - 1)


def _loss(logits: Tensor, labels: Tensor, place: tuple[Tensor, ...]) -> Tensor:
    """Each token but a text's last foretells the label of the token that comes after it."""
    texts, given = place[0], labels[place]
    following = torch.where(texts[1:] == texts[:-1], given[1:], IGNORED).long()
    return nn.functional.cross_entropy(logits[:-1].float(), following, ignore_index=IGNORED)


class _Inside:
    """What a pass of R tokens comes by, gathered by hooks and spread out over texts and columns."""

    def __init__(
        self, shape: torch.Size, place: tuple[Tensor, ...], batch: TorchBatch, states: bool, weights: bool
    ) -> None:
        self.shape, self.place, self.batch = shape, place, batch
        self.wants = {"": states, "self_attn": weights}
        self.states: list[Tensor] = []
        self.weights: list[Tensor] = []

    def spread(self, x: Tensor) -> Tensor:
        """[R, ...] -> [B, T, ...]"""
        return x.new_zeros(*self.shape, *x.shape[1:]).index_put(self.place, x)

    @contextmanager
    def watched(self, model: Llama) -> Iterator[None]:
        hooks: dict[str, Callable[..., None]] = {"": self._state, "self_attn": self._weights}
        handles = [
            layer.get_submodule(path).register_forward_pre_hook(hook)
            for layer in model.model.layers
            for path, hook in hooks.items()
            if self.wants[path]
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _state(self, layer: nn.Module, given: tuple[Any, ...]) -> None:
        self.states.append(self.spread(given[0]))

    def _weights(self, attention: Any, given: tuple[Any, ...]) -> None:
        q, k = attention.queries_and_keys(*given[:2])
        texts, columns = self.place
        out = q.new_zeros(self.shape[0], q.shape[1], self.shape[1], self.shape[1])  # [B, H, T, T]
        for run in self.batch.runs:
            rows = slice(run.begin, run.end)
            at = columns[rows]
            found = attention_weights(q[rows], k[rows], run).flatten(0, 1)  # [H, S, S]
            out[int(texts[run.begin])][:, at[:, None], at] = found.to(out.dtype)
        self.weights.append(out)
