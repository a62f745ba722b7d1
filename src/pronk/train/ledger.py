"""Ledger: the bytes of all live tensors, by what they are for, and the most there ever was of them.

It sees every tensor that an operation makes and when its storage is freed again, forward, backward and update alike: of
real tensors, which measures, and of fake ones (torch's FakeTensorMode), which foretells. What an operation takes for
itself while it runs it does not see.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

T = TypeVar("T")

# parameters: and buffers. optimizer: its state, and what an update takes. logits: rows as wide as the vocabulary, with
# their gradients. activations: all else, whether it is kept for the backward pass or lives for one operation.
KINDS = ("parameters", "gradients", "optimizer", "activations", "logits")

# What operations take for themselves is not seen; of one it is as much as what they are given, and that may be logits.
_TWICE = (torch.ops.aten.logsumexp.default,)


class Ledger(TorchDispatchMode):
    """Around training steps of `model`; a context manager."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, vocab_size: int) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()  # now
        self.most: Counter[str] = Counter()  # of each kind by itself
        self.at_peak: Counter[str] = Counter()  # when there was most of all together
        self._model, self._optimizer, self._vocab_size = model, optimizer, vocab_size
        self._kinds: dict[int, tuple[str, int, Any]] = {}  # by id of the storage: kind, bytes, a weak reference to it
        self._new = "activations"  # what a tensor is, if nothing else is known of it
        self._hooks: list[Any] = []

    def __enter__(self) -> Ledger:
        self._file("parameters", [*self._model.parameters(), *self._model.buffers()])
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._file("gradients", [p.grad for p in trained if p.grad is not None])
        self._file("optimizer", tree_leaves([*self._optimizer.state.values()]))
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._as_gradient) for parameter in trained]
        self._hooks.append(self._optimizer.register_step_pre_hook(self._begin_update))
        self._hooks.append(self._optimizer.register_step_post_hook(self._end_update))
        self.begin()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def begin(self) -> None:
        """Let the peaks begin anew from what there is."""
        self.most, self.at_peak = Counter(self.bytes), Counter(self.bytes)

    def __torch_dispatch__(
        self, operation: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = operation(*args, **(kwargs or {}))
        self._add(found)
        if operation in _TWICE:
            self._look(args[0].nbytes)
        return found

    def _add(self, found: Any) -> None:
        """What is new of it. A view's storage is known already."""
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and id(storage := tensor.untyped_storage()) not in self._kinds:
                wide = tensor.ndim == 2 and tensor.shape[-1] == self._vocab_size and self._new == "activations"
                self._book(storage, "logits" if wide else self._new)
        self._look()

    def _look(self, inside: int = 0) -> None:
        """Whether this is the peak, with so many bytes more, of logits."""
        if self.bytes.total() + inside > self.at_peak.total():
            self.at_peak = self.bytes + Counter(logits=inside)
        self.most["logits"] = max(self.most["logits"], self.bytes["logits"] + inside)

    def _file(self, kind: str, tensors: Iterable[Any]) -> None:
        """These are of that kind, whatever they were taken for."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if known := self._kinds.pop(id(storage), None):
                    self.bytes[known[0]] -= known[1]
                self._book(storage, kind)

    def _book(self, storage: torch.UntypedStorage, kind: str) -> None:
        key, size = id(storage), storage.nbytes()
        self._kinds[key] = kind, size, weakref.ref(storage, lambda _: self._forget(key))
        self.bytes[kind] += size
        self.most[kind] = max(self.most[kind], self.bytes[kind])

    def _forget(self, key: int) -> None:
        kind, size, _ = self._kinds.pop(key)
        self.bytes[kind] -= size

    def _as_gradient(self, parameter: Tensor) -> None:
        self._file("gradients", [parameter.grad])

    def _begin_update(self, *_: Any) -> None:
        self._new = "optimizer"

    def _end_update(self, *_: Any) -> None:
        self._new = "activations"


def operations(work: Callable[[], T]) -> tuple[int, T]:
    """Of the matrix products in `work`, a multiplication and an addition being two; and what it gives."""
    packed = {torch.ops.mkldnn._linear_pointwise: _of_linear} if torch.backends.mkldnn.is_available() else {}
    with FlopCounterMode(display=False, custom_mapping=packed) as counted:
        found = work()
    return counted.get_total_flops(), found


def _of_linear(x: Sequence[int], weight: Sequence[int], *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Of x [..., K] and weight [N, K], by their shapes."""
    return 2 * math.prod(x) * weight[0]
