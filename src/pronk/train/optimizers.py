"""Optimizers: AdamW, Adafactor, Muon (muon.py) and SGD as torch has them, and AdamW with its moments in 8 bits.

Only matrices decay: norms and biases are few, and pulling them to zero helps nobody.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from copy import copy
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from pronk.errors import BadRequest
from pronk.torch_engine.gpu.launch import fuses
from pronk.train import muon
from pronk.train.unread import Unread

Kind = Literal["adamw", "adamw8bit", "adafactor", "muon", "sgd"]
BLOCK = 256  # numbers that share a scale in AdamW8bit
# Of a state, what is never below 0.
UNSIGNED = ("step", "exp_avg_sq", "second", "first_scale", "second_scale", "row_var", "col_var", "variance")
# What steps of these need is of a whole tensor, where each process holds some rows: why they are for one process.
UNCUT = {
    "adamw8bit": "adamw8bit's codes are",
    "adafactor": "adafactor's means of rows and columns are",
    "muon": "muon's matrices are",
}
_CODES = {"first": torch.int8, "second": torch.uint8}
_SQUARE_ROOTS = {"first": 2, "second": 3}  # taken one after the other before a moment is coded
_PIECE = 1 << 20  # numbers, whole blocks
_SMALL = 4096  # parameters with fewer numbers keep float32 moments: there is nothing to save


def make(
    model: nn.Module,
    kind: str,
    rate: float,
    decay: float,
    betas: tuple[float, float] = (0.9, 0.95),
    ratio: float | None = None,
) -> Optimizer:
    """Over what of `model` is to be trained. Raises BadRequest for an unknown kind.

    `ratio`: LoRA+ (arXiv 2402.12354), which learns B faster than A: how many times the rate is that of B, and as in
    PEFT's create_loraplus_optimizer of all that is no matrix. A group says it as "lr_ratio".
    """
    if kind not in get_args(Kind):
        raise BadRequest(f"the optimizer must be one of {', '.join(get_args(Kind))}, not {kind!r}")
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    faster = {name for name, p in trained if p.ndim <= 1 or name.endswith("lora_B")} if ratio else set()
    chosen: dict[tuple[float, float, bool], list[Tensor]] = {}
    for matrices in (True, False):
        for name, parameter in trained:
            if (parameter.ndim > 1) is matrices:
                by_muon = kind == "muon" and muon.takes(name, parameter)
                like = decay if matrices else 0.0, (ratio or 1.0) if name in faster else 1.0, by_muon
                chosen.setdefault(like, []).append(parameter)
    groups = [
        {"params": params, "weight_decay": own, "lr_ratio": times, "lr": rate * times, "by_muon": by_muon}
        for (own, times, by_muon), params in chosen.items()
    ]
    if kind == "sgd":
        return SGD(groups, lr=rate, momentum=betas[0])
    if kind == "adafactor":
        return Adafactor(groups, lr=rate)
    if kind == "muon":
        return muon.Muon(groups, rate, betas)
    if kind == "adamw8bit":
        return AdamW8bit(groups, lr=rate, betas=betas)
    on_gpu = all(parameter.is_cuda for _, parameter in trained)
    return AdamW(groups, lr=rate, betas=betas, fused=on_gpu or None)


def states_of(optimizer: Optimizer) -> dict[Tensor, dict[str, Tensor]]:
    """What its first step makes for each of its parameters, rehearsed on ones without bytes."""
    found: dict[Tensor, dict[str, Tensor]] = {}
    for part in optimizer.parts if isinstance(optimizer, muon.Muon) else [optimizer]:
        rehearsal = copy(part)
        rehearsal.state = defaultdict(dict)
        bare = {
            p: nn.Parameter(torch.empty_like(p, device="meta")) for group in part.param_groups for p in group["params"]
        }
        for one in bare.values():
            one.grad = torch.empty_like(one)
        rehearsal.param_groups = [
            # torch has no fused step of tensors without bytes, and beside a GPU asks each copy for `capturable`.
            {"capturable": False, **group, "params": [bare[p] for p in group["params"]], "fused": None}
            for group in part.param_groups
        ]
        with Unread():
            rehearsal.step()
        found |= {parameter: dict(rehearsal.state[one]) for parameter, one in bare.items()}
        for group in part.param_groups:
            for parameter in group["params"] if group.get("fused") else ():  # which counts steps on its device
                found[parameter]["step"] = found[parameter]["step"].to("meta")
    return found


class AdamW8bit(Optimizer):
    """AdamW (arXiv 1711.05101) whose moments are codes of 8 bits with a scale for each 256, as in arXiv 2110.02861.

    A quarter of the memory: 2 bytes a parameter instead of 8. Both moments span orders of magnitude within 256 numbers,
    and steps are their quotient, so that what is small of them matters as well: the first is coded by its fourth root,
    with its sign, and the second by its eighth, which is the fourth of what steps are divided by. Coded as they are, or
    by lower roots, small second moments become 0 where first moments do not, and steps leap.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        """A piece at a time: moments as floats are of pieces alone, not of an embedding's size."""
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            _begin(state, parameter)
        state["step"] += 1
        step = int(state["step"])
        correction = (1 - beta2**step) ** 0.5
        rate = group["lr"] / (1 - beta1**step)
        values, grads = parameter.view(-1), grad.reshape(-1)
        if "first_scale" in state and fuses(parameter):
            from pronk.torch_engine.gpu import adamw8bit

            moments = (state[name] for name in ("first", "first_scale", "second", "second_scale"))
            how = {"eps": group["eps"], "rate": rate, "correction": correction}
            keep = 1 - group["lr"] * group["weight_decay"]
            adamw8bit.update(values, grads, *moments, betas=(beta1, beta2), keep=keep, **how)
            return
        for at in range(0, len(values), _PIECE):
            piece = slice(at, min(at + _PIECE, len(values)))
            first, second = _recall(state, "first", piece), _recall(state, "second", piece)
            g = grads[piece].float()
            first.lerp_(g, 1 - beta1)
            second.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            _keep(state, "first", first, piece)
            _keep(state, "second", second, piece)
            values[piece].mul_(1 - group["lr"] * group["weight_decay"])
            values[piece].addcdiv_(first, (second.sqrt() / correction).add_(group["eps"]), value=-rate)


def _begin(state: dict[str, Any], parameter: Tensor) -> None:
    state["step"] = torch.tensor(0.0)  # as torch's own optimizers have it
    blocks = -(-parameter.numel() // BLOCK)
    for name, kind in _CODES.items():
        if parameter.numel() < _SMALL:
            state[name] = torch.zeros_like(parameter, dtype=torch.float32)
        else:
            state[name] = torch.zeros(blocks, BLOCK, dtype=kind, device=parameter.device)
            state[name + "_scale"] = torch.zeros(blocks, 1, device=parameter.device)


def _keep(state: dict[str, Any], name: str, values: Tensor, piece: slice) -> None:
    stored: Tensor = state[name]
    if stored.dtype == torch.float32:
        stored.view(-1)[piece] = values
        return
    roots = values.abs()
    for _ in range(_SQUARE_ROOTS[name]):
        roots.sqrt_()
    roots.copysign_(values)
    blocks = torch.nn.functional.pad(roots, (0, -len(roots) % BLOCK)).view(-1, BLOCK)
    scale = blocks.abs().amax(-1, keepdim=True) / torch.iinfo(stored.dtype).max
    codes = (blocks / scale.clamp(min=torch.finfo(torch.float32).tiny)).round_()
    stored[_rows(piece)] = codes.to(stored.dtype)
    state[name + "_scale"][_rows(piece)] = scale


def _recall(state: dict[str, Any], name: str, piece: slice) -> Tensor:
    """In float32, flat: not the state itself."""
    stored: Tensor = state[name]
    if stored.dtype == torch.float32:
        return stored.view(-1)[piece].clone()
    roots = (stored[_rows(piece)].float() * state[name + "_scale"][_rows(piece)]).view(-1)[: piece.stop - piece.start]
    values = roots.clone()
    for _ in range(_SQUARE_ROOTS[name]):
        values.square_()
    return values.copysign_(roots)


def _rows(piece: slice) -> slice:
    """Of a piece, its blocks: it begins where one does."""
    return slice(piece.start // BLOCK, -(-piece.stop // BLOCK))
