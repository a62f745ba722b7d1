"""Linear layers in oneDNN's own weight layout, for inference on CPUs.

torch's plain product of one row with a weight reads memory at half the speed this layout allows (bench/NOTES.md), and
in decoding reading weights is all there is to do. The operators are those that torch.compile itself emits for frozen
weights; where a torch has none, plain layers stay.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PackedLinear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        rows = 1  # the layout is chosen for decoding; it serves long prompts as well
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), rows)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return out


def pack(model: nn.Module) -> None:
    """Replace every Linear of a model that will only infer; layer by layer, so that at most one is there twice."""
    # Names, for a list of the layers themselves would keep every one of them alive to the end.
    for name in [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]:
        owner, _, leaf = name.rpartition(".")
        linear = model.get_submodule(name)
        if isinstance(linear, nn.Linear) and can_pack(linear.weight):
            setattr(model.get_submodule(owner), leaf, PackedLinear(linear))
        del linear


def can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    known = hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    fast = weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    return known and fast
