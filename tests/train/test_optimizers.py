"""AdamW in 8 bits: inside of what its roundings allow, by theory, and no farther from AdamW than bitsandbytes' own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from pronk.train.optimizers import BLOCK, AdamW8bit

SHAPE = (96, 128)
RATE, BETAS, EPS, DECAY = 1e-2, (0.9, 0.95), 1e-8, 0.1
STEPS = 40
KINDS: dict[str, Callable[..., Optimizer]] = {"32": AdamW, "8": AdamW8bit}


def gradients(spread: float, seed: int = 1) -> list[Tensor]:
    """With a direction that lasts, and sizes within a block e^spread apart, more or less."""
    draw = torch.Generator().manual_seed(seed)
    lasting, size = torch.randn(SHAPE, generator=draw) * 0.1, torch.exp(spread * torch.randn(SHAPE, generator=draw))
    return [(lasting + torch.randn(SHAPE, generator=draw)) * size for _ in range(STEPS)]


def start() -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))


def moved(make: Callable[..., Optimizer], grads: list[Tensor]) -> Tensor:
    parameter = nn.Parameter(start())
    optimizer = make([parameter], lr=RATE, betas=BETAS, weight_decay=DECAY)
    for grad in grads:
        parameter.grad = grad.clone()
        optimizer.step()
    return parameter.detach() - start()


def off(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


# -- The bound: AdamW in float64, and how far codes may have led every number of it astray --


def rounding(largest: Tensor, low: Tensor, high: Tensor, codes: int, power: int) -> tuple[Tensor, Tensor]:
    """Numbers from `low` to `high` of blocks whose largest magnitude is at most `largest`, after they were codes.

    Half a step of the root, which has `codes` steps up to the largest, and what float32 does to it.
    """
    step = largest ** (1 / power) * (0.5 / codes + 1e-6)

    def moved_by(values: Tensor, by: Tensor) -> Tensor:
        roots = values.abs() ** (1 / power) * values.sign() + by
        return roots.abs() ** power * roots.sign()

    return moved_by(low, -step), moved_by(high, step)


def largest_of_block(low: Tensor, high: Tensor) -> Tensor:
    most = torch.maximum(low.abs(), high.abs()).view(-1, BLOCK)
    return most.amax(1, keepdim=True).expand_as(most).reshape(SHAPE)


def bounds(grads: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Where the parameter may be after all steps: lowest and highest."""
    (beta1, beta2), tiny = BETAS, 1e-6  # of float32 arithmetic, generously
    low, high = start().double(), start().double()
    m = v = (torch.zeros(SHAPE, dtype=torch.float64),) * 2
    for step, grad in enumerate((g.double() for g in grads), 1):
        m = beta1 * m[0] + (1 - beta1) * grad, beta1 * m[1] + (1 - beta1) * grad
        v = beta2 * v[0] + (1 - beta2) * grad**2, beta2 * v[1] + (1 - beta2) * grad**2
        below, above = ((x / (1 - beta2**step)).sqrt() + EPS for x in v)
        quotients = torch.stack([x / (1 - beta1**step) / d for x in m for d in (below, above)])
        least, most = quotients.amin(0), quotients.amax(0)
        low, high = ((1 - RATE * DECAY) * at for at in (low, high))
        low, high = low - RATE * (most + tiny * most.abs()), high - RATE * (least - tiny * least.abs())
        m = rounding(largest_of_block(*m), *m, codes=127, power=4)
        v = rounding(largest_of_block(*v), *v, codes=255, power=8)
        v = v[0].clamp(min=0), v[1]
    return low - 1e-5, high + 1e-5


@pytest.mark.parametrize("spread", [0.0, 1.0, 2.0])
def test_codes_lead_no_farther_astray_than_they_may(spread: float) -> None:
    grads = gradients(spread)[:12]
    low, high = bounds(grads)
    exact = start() + moved(AdamW, grads)
    assert ((low <= exact) & (exact <= high)).all()
    found = start() + moved(AdamW8bit, grads)
    assert ((low <= found) & (found <= high)).all()
    assert (high - low).median() < (exact - start()).abs().median()  # and that is not far


@pytest.mark.parametrize("plant", ["linear", "sign"])
def test_the_bound_would_see_another_code(plant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments coded as they are, and a first moment without its sign."""
    from pronk.train import optimizers

    if plant == "linear":
        monkeypatch.setattr(optimizers, "_SQUARE_ROOTS", {"first": 0, "second": 0})
    else:
        whole = optimizers._recall
        monkeypatch.setattr(optimizers, "_recall", lambda *arguments: whole(*arguments).abs())
    grads = gradients(1.0)[:12]
    low, high = bounds(grads)
    found = start() + moved(AdamW8bit, grads)
    assert not ((low <= found) & (found <= high)).all()


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.0, 1.0, 2.0])
def test_as_near_to_adamw_as_bitsandbytes(spread: float) -> None:
    """Its codes are dynamic (arXiv 2110.02861), ours roots: 1.6% and 1.6%, 2.9% and 5.9%, 6.8% and 45%."""
    bnb = pytest.importorskip("bitsandbytes")
    grads = gradients(spread)
    exact = moved(AdamW, grads)
    ours, theirs = off(moved(AdamW8bit, grads), exact), off(moved(bnb.optim.AdamW8bit, grads), exact)
    assert ours < 1.1 * theirs
    assert ours < 0.1


def state_bytes(optimizer: Optimizer) -> int:
    return sum(t.nbytes for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t))


@pytest.mark.parametrize(("kind", "bytes_each"), [("32", 8.0), ("8", 2 + 8 / BLOCK)])
def test_what_is_kept_of_a_parameter(kind: str, bytes_each: float) -> None:
    parameter = nn.Parameter(start())
    optimizer = KINDS[kind]([parameter])
    parameter.grad = torch.ones(SHAPE)
    optimizer.step()
    assert state_bytes(optimizer) == bytes_each * parameter.numel() + 4  # which step it is


@pytest.mark.parametrize("scale", [1e-18, 1e-8, 1e8])
def test_sizes_far_from_one(scale: float) -> None:
    """Second moments are squares: of these sizes float32 has few digits left, or none, and no step may leap."""
    grads = [grad * scale for grad in gradients(1.0)]
    found = moved(AdamW8bit, grads)
    assert found.isfinite().all()
    assert off(found, moved(AdamW, grads)) < 0.1


def test_a_parameter_without_gradient_stays() -> None:
    found: dict[str, Any] = {}
    for name, make in KINDS.items():
        parameter = nn.Parameter(start())
        optimizer = make([parameter], lr=RATE, weight_decay=0.0)
        for _ in range(3):
            parameter.grad = torch.zeros(SHAPE)
            optimizer.step()
        found[name] = parameter.detach()
    assert torch.equal(found["8"], start())
    assert torch.equal(found["32"], start())
