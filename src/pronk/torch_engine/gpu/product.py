"""Product: x W^T of matrices that share their input, with what stands before and behind it in a block."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

Norm = tuple[Tensor, float]  # weight [K] and eps of an RMSNorm


class Product(Protocol):
    def __call__(
        self, x: Tensor, *, norm: Norm | None = None, residual: Tensor | None = None, gated: bool = False
    ) -> Tensor:
        """x [T, K] -> [T, N], in x's type.

        `norm`: what x goes through first. `residual` [T, N]: what is added; it may be written over. `gated`: of the N
        rows half are gates and half are ups, in this order, and the result is silu(gate) * up, [T, N / 2].
        """
