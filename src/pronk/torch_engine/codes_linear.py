"""CodesLinear: a matrix of 8 or 4 bits is multiplied as the numbers that its codes stand for.

A few rows at a time are made floats, used and forgotten, in the forward pass and again in the backward pass, which
needs x's gradient alone. Activations are not rounded. So the gradient is exactly that of what was computed; and of
int8 and llm-int8, which differ in what they do to activations, LoRA is trained beside the same. (bitsandbytes' 8-bit
layer rounds activations on the way forward, and takes no notice of that on the way back.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pronk.checkpoint.tensors import SCORE, Checkpoint, LazyTensor
from pronk.errors import BadRequest
from pronk.formats import packed
from pronk.torch_engine.codes import Codes, read
from pronk.torch_engine.functions import compute_type, product
from pronk.torch_engine.gpu.launch import fuses

if TYPE_CHECKING:
    from pronk.torch_engine.gpu.codes import CodesProduct


class CodesLinear(nn.Module):
    """y = x W^T + bias of a W in codes: takes the place of a Linear whose weight is not trained."""

    q: Tensor
    scale: Tensor
    minimum: Tensor | None

    def __init__(self, weight: Codes, bias: nn.Parameter | None, format: str) -> None:
        super().__init__()
        self.format = format
        self.out_features, self.in_features, self.origin = len(weight.q), weight.columns, weight.origin
        self.turned = weight.turned
        for name in ("q", "scale", "minimum"):
            self.register_buffer(name, getattr(weight, name))
        self.bias = bias
        self.joined: tuple[CodesProduct, slice] | None = None  # whose rows its codes are, where it has none itself

    @property
    def codes(self) -> Codes:
        if self.joined:
            product, rows = self.joined
            return product.codes(rows)
        return Codes(self.in_features, self.q, self.scale, self.minimum, self.origin, self.turned)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N], in the type that products are computed in: x's own, or autocast's."""
        if self.joined:
            product, rows = self.joined
            y = product.of_many(x, rows)
        else:
            y = cast(Tensor, _Product.apply(x, self.codes, compute_type(x)))
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def join(self, product: CodesProduct, rows: slice) -> None:
        """Give its codes up for those rows of a product, which have them, too."""
        self.joined, self.q, self.scale, self.minimum = (product, rows), None, None, None  # type: ignore[assignment]

    def dequantized(self) -> Tensor:
        """W, [N, K] float32, in one piece."""
        return self.codes.floats(slice(None))


class _Product(torch.autograd.Function):
    """x W^T. Nothing is saved for the backward pass but the codes, which are there anyway."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Codes, dtype: torch.dtype) -> Tensor:
        ctx.weight, ctx.like = weight, x.dtype
        given = x.to(dtype)
        if fuses(given) and not weight.turned:
            return given @ _whole(weight, dtype).t()
        y = given.new_empty(len(x), len(weight.q))  # before what is forgotten, in whose place it would leave a hole
        for rows in weight.pieces():
            y[:, rows] = product(given, weight.floats(rows).to(dtype).t())
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        weight: Codes = ctx.weight
        if fuses(grad) and not weight.turned:
            return (grad @ _whole(weight, grad.dtype)).to(ctx.like), None, None
        found: Tensor | None = None  # a sum in float32
        for rows in weight.pieces():
            part = product(grad[:, rows].contiguous(), weight.floats(rows).to(grad.dtype)).float()
            found = part if found is None else found.add_(part)
        assert found is not None
        return found.to(ctx.like), None, None


def _whole(weight: Codes, dtype: torch.dtype) -> Tensor:
    """[N, K]: a GPU makes floats of a matrix in one pass, and multiplies well by nothing smaller."""
    from pronk.torch_engine.gpu.dequantize import dequantize

    return dequantize(weight.q, weight.scale, weight.minimum, weight.origin, weight.columns, dtype)


def linear(
    checkpoint: Checkpoint, format: str, device: torch.device, dtype: torch.dtype
) -> Callable[[LazyTensor, nn.Linear], CodesLinear | None]:
    """For load_model: what takes the place of every Linear as its weight arrives, to be multiplied with a `dtype`.

    The head is codes, too, in the format that its record leaves it: of a small model it is up to a third of all bytes
    that a token takes. The embedding, of which a token takes a row, is not.
    """

    def made(tensor: LazyTensor, plain: nn.Linear) -> CodesLinear | None:
        if tensor.name == SCORE:
            return None
        own = packed(format, tensor.dtype, outer=not tensor.name.startswith("model.layers."))
        codes = read(checkpoint, tensor, own.kind_of or own.name)
        if dtype == torch.float16 and codes.largest() > torch.finfo(dtype).max:
            problem = "holds numbers too large for f16; take bf16 or f32"
            raise BadRequest(f"{checkpoint.path}: tensor {tensor.name!r} {problem}")
        return CodesLinear(codes.to(device), plain.bias, own.kind_of or own.name)

    return made
