"""Linear layers in 8 bits, by the schemes of formats.int8: weights are codes, activations made into codes on the way.

The codes are those of formats.int8, bit for bit, and sums of their products are exact; scales, the part that LLM.int8()
computes apart, and biases are float32, whatever type the rest of the model has.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pronk.formats import FORMATS
from pronk.formats.int8 import Outliers, Scheme
from pronk.formats.turn import together

_EXACT = 1024  # columns: 128 * 127 * 1024 < 2^24, so that float32 holds every sum over them


@dataclass(frozen=True)
class Int8Codes:
    """A matrix as scale * (q + zero)."""

    q: Tensor  # [rows, K] int8
    scale: Tensor  # [rows, 1] or [1, 1] float32
    zero: Tensor | None = None  # int64, a single number; None: 0
    turned: bool = False  # whether it is one of turned rows: see formats.turn


class Int8Linear(nn.Module):
    """y = x w^T by a scheme. `outliers` matter to llm-int8 alone."""

    q: Tensor
    scale: Tensor
    zero: Tensor | None

    def __init__(self, weight: Int8Codes, bias: nn.Parameter | None, scheme: Scheme, outliers: Outliers) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.q.shape
        self.scheme, self.outliers, self.turned = scheme, outliers, weight.turned
        self.register_buffer("q", weight.q)  # [N, K]
        self.register_buffer("scale", weight.scale)  # [N, 1] or [1, 1]
        self.register_buffer("zero", weight.zero)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N], in the type of x."""
        if not len(x):
            return x.new_empty(0, self.out_features)
        rest = given = turn(x.float()) if self.turned else x.float()
        if apart := find_outliers(given, self.outliers) if self.scheme == "llm-int8" else None:
            rest = given.masked_fill(apart.mask, 0)
        codes = activation_codes(rest, self.scheme)
        y = self._sums(codes).float() * codes.scale
        if apart and len(apart.columns):
            taken = given.masked_fill(~apart.mask, 0)[:, apart.columns]
            y += taken @ self.q[:, apart.columns].float().T
        y *= self.scale.T
        if self.bias is not None:
            y += self.bias
        return y.to(x.dtype)

    def dequantized(self) -> Tensor:
        """The weight that this layer multiplies with, float32."""
        q = self.q.float()
        weight = self.scale * (q if self.zero is None else q + self.zero)
        return turn(weight) if self.turned else weight

    def _sums(self, x: Int8Codes) -> Tensor:
        """Whole numbers [T, N]: of (x.q + x.zero) (q + zero) over k, multiplied out."""
        sums = int_product(x.q, self.q)
        if x.zero is None or self.zero is None:
            return sums
        rows, columns = (m.sum(1, dtype=torch.int64) for m in (x.q, self.q))
        return sums + self.zero * rows[:, None] + x.zero * columns + self.in_features * self.zero * x.zero


@dataclass(frozen=True)
class Apart:
    mask: Tensor  # [T, K]: True where an activation is computed apart
    columns: Tensor  # those that have any


def find_outliers(x: Tensor, rule: Outliers) -> Apart:
    """See pronk.formats.int8.Outliers."""
    magnitude = x.abs()
    mask = magnitude > rule.threshold
    if rule.least:
        largest = magnitude.topk(min(rule.least, x.shape[1]), sorted=True).values
        mask |= (magnitude >= largest[:, -1:]) & (magnitude > 0)
    return Apart(mask, mask.any(0).nonzero()[:, 0])


def turn(x: Tensor) -> Tensor:
    """[T, K] float32; see pronk.formats.turn."""
    block = together(x.shape[-1])
    stages = x.reshape(-1, block)
    for _ in range(block.bit_length() - 1):
        first, second = stages.chunk(2, dim=1)
        stages = torch.stack((first + second, first - second), dim=-1).flatten(1)
    return (stages * (1 / x.new_full((), block).sqrt())).view(x.shape)


def weight_codes(w: Tensor, scheme: Scheme) -> Int8Codes:
    """Of w [N, K], float32; see pronk.formats.int8.weight_codes."""
    if scheme == "zeropoint":
        return _zeropoint(w)
    turned = FORMATS[scheme].turned
    w = turn(w) if turned else w
    # amax(|w|) without |w|, which would be another tensor of this size
    most, least = (w.amax(), w.amin()) if scheme in ("absmax", "absmax-row") else (w.amax(1), w.amin(1))
    scale = torch.maximum(most, -least).view(-1, 1)
    scale = scale / scale.new_full((), 127)
    q = w.div(scale).masked_fill_(scale == 0, 0).clamp_(-127, 127).round_()
    return Int8Codes(q.to(torch.int8), scale, turned=turned)


def activation_codes(x: Tensor, scheme: Scheme) -> Int8Codes:
    """Of x [T, K], turned or without its outliers: see formats.int8.activation_codes. NaN and infinity make the scale
    so."""
    if scheme == "zeropoint":
        return _zeropoint(x)
    largest = x.abs().amax().view(1, 1) if scheme == "absmax" else x.abs().amax(1, keepdim=True)
    steps = largest.new_full((), 127)  # a number of Python's would be made into a product with an inverse, which rounds
    inverse = steps / largest
    tiny = inverse.isinf()
    q = (x * inverse.masked_fill(tiny, 0)).round_()
    return Int8Codes(q.to(torch.int8), (largest / steps).masked_fill_(tiny, 0))


def int_product(a: Tensor, b: Tensor) -> Tensor:
    """a [T, K] b[N, K]^T of int8, exact in int32."""
    if not has_int_product(a.device):
        return _product_in_floats(a, b)
    return torch._int_mm(a, b.T) if a.device.type == "cpu" else _padded_product(a, b)


@cache
def has_int_product(device: torch.device) -> bool:
    """Whether torch has one that is worth taking. On CPUs without AVX-512 its own is slower than floats."""
    if device.type == "cpu":
        return torch.backends.cpu.get_cpu_capability() == "AVX512"
    try:
        ones = torch.ones(24, 8, dtype=torch.int8, device=device)
        return bool((torch._int_mm(ones, ones[:8].T) == 8).all())
    except RuntimeError:  # older GPUs
        return False


def _product_in_floats(a: Tensor, b: Tensor) -> Tensor:
    sums = torch.zeros(len(a), len(b), dtype=torch.int32, device=a.device)
    for some, others in zip(a.split(_EXACT, 1), b.split(_EXACT, 1), strict=True):
        sums += (some.float() @ others.float().T).int()
    return sums


def _padded_product(a: Tensor, b: Tensor) -> Tensor:
    """CUDA's wants more than 16 rows, and multiples of 8 of everything else."""
    (t, k), n = a.shape, b.shape[0]
    a = _padded(a, 24 if t <= 16 else t, -(-k // 8) * 8)
    b = _padded(b, -(-n // 8) * 8, a.shape[1])
    return torch._int_mm(a, b.T)[:t, :n]


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    missing = (0, columns - x.shape[1], 0, rows - x.shape[0])
    return F.pad(x, missing) if any(missing) else x


def _zeropoint(x: Tensor) -> Int8Codes:
    low, high = x.amin().clamp(max=0), x.amax().clamp(min=0)
    scale = ((high.double() - low.double()) / high.new_full((), 254, dtype=torch.float64)).float()
    flat = scale == 0  # nothing but zeros, or numbers of no account
    zero = ((low / scale).round().nan_to_num(-127) + 127).masked_fill(flat, 0)
    q = ((x / scale).round() - zero).nan_to_num(0).clamp(-127, 127).masked_fill(flat, 0)
    return Int8Codes(q.to(torch.int8), scale.view(1, 1), zero.long())
