"""Int8Product: a Product whose weights are codes of 8 bits, and whose activations become such on the way.

What it means is pronk.torch_engine.quantized.Int8Linear: the same codes of activations to the bit, the same outliers,
and results that differ by the order of float32 sums. A row's result depends on no other but in its last bits: which
kernel a number of rows takes, and whether the outliers of all are in a few columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pronk.formats import FORMATS, int8
from pronk.formats.int8 import Outliers, Scheme
from pronk.torch_engine.gpu import activation_codes
from pronk.torch_engine.gpu.int8_few import few_product, row_product
from pronk.torch_engine.gpu.int8_many import many_product, wants_common
from pronk.torch_engine.gpu.int8_some import some_product
from pronk.torch_engine.gpu.norms import rms_norm, swiglu
from pronk.torch_engine.gpu.product import Norm, Product

SCHEMES = tuple(scheme for scheme in int8.SCHEMES if not FORMATS[scheme].shares_scales)  # each row is judged alone
FEW, SOME = 16, 64  # rows, up to which kernels wait for weights


class Int8Product(Product):
    def __init__(
        self, q: Tensor, scale: Tensor, bias: Tensor | None, scheme: Scheme, outliers: Outliers, turned: bool
    ) -> None:
        """q [N, K] int8, contiguous; scale [N, 1] or [1, 1] float32; bias [N]. `outliers` matter to llm-int8 alone."""
        if scheme not in SCHEMES:
            raise ValueError(f"no kernel has {scheme}")
        self.q, self.bias, self.turned = q, bias, turned
        self.scale = scale.expand(len(q), 1).contiguous().view(-1)
        apart = FORMATS[scheme].outliers and (outliers.least > 0 or outliers.threshold < float("inf"))
        self.outliers = outliers if apart else None

    def __call__(
        self, x: Tensor, *, norm: Norm | None = None, residual: Tensor | None = None, gated: bool = False
    ) -> Tensor:
        rows, n = len(x), len(self.q)
        y = x.new_empty(rows, n // 2 if gated and rows <= FEW else n)
        if not rows:
            return y
        rest = (self.q, self.scale, self.bias, residual, y)
        if rows == 1:
            row_product(activation_codes.of_a_row(x, norm, self.outliers, self.turned), *rest, gated)
        elif rows <= FEW:
            codes, scales = activation_codes.of_few(x, norm, self.outliers, self.turned)
            few_product(codes, scales, *rest, gated)
        elif rows <= SOME and x.dtype != torch.float32 and self.outliers:
            codes, factors = activation_codes.of_some(x, norm, self.outliers, self.turned)
            some_product(codes, factors, *rest)
            return swiglu(y) if gated else y
        else:
            h = rms_norm(x, *norm) if norm else x
            common = wants_common(rows, self.outliers)
            many_product(h, activation_codes.of_many(h, self.outliers, self.turned, common), self.outliers, *rest)
            return swiglu(y) if gated else y
        return y
