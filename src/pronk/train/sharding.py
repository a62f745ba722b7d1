"""A model cut among processes by FSDP2 (`fully_shard`; PyTorch FSDP is arXiv 2304.11277).

Of every weight each process holds some rows. A block's weights are gathered before its forward pass and again before
its backward pass, and let go after each; gradients are summed where their rows are. Embeddings, the last norm and the
head are one group, and stay whole from the forward to the backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from pronk.checkpoint.adapter import LoraConfig
from pronk.checkpoint.tensors import Checkpoint, Progress
from pronk.torch_engine.backend import DTYPES, floats
from pronk.torch_engine.model import Llama
from pronk.train import lora
from pronk.train.distributed import Group


def load(
    checkpoint: Checkpoint, group: Group, config: LoraConfig | None, precision: str, progress: Progress | None = None
) -> Llama:
    """Cut while it is empty, then filled tensor by tensor: at its peak, a process's share and one tensor on the CPU.

    LoRA's matrices are drawn whole by every process, from the same seed, so that they are what one process draws.
    """
    device = torch.device(group.device or "cpu")
    with torch.device("meta"):
        model = Llama(checkpoint.config)
    if config:
        lora.add(model, config, device)
    mesh = cut(model, group, precision)
    total, done = sum(tensor.nbytes for tensor in checkpoint.tensors.values()), 0
    for name, tensor in checkpoint.tensors.items():
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        module = module.base if isinstance(module, lora.LoraLinear) else module
        rows = _rows(floats(checkpoint, tensor, torch.device("cpu"), torch.float32), mesh)
        setattr(module, leaf, nn.Parameter(rows, requires_grad=getattr(module, leaf).requires_grad))
        done += tensor.nbytes
        if progress:
            progress(name, done, total)
    model.tie_weights()
    for _, layer in lora.layers(model):
        layer.begin()
    return model


def cut(model: Llama, group: Group, precision: str = "f32") -> DeviceMesh:
    """In place; buffers, such as codes, stay whole. The mesh is over the group.

    Blocks are gathered in the type they are computed in, so that no more than rows is kept in 32 bits.

    Autocast alone would keep 16-bit copies of all weights from the forward to the backward pass. What it leaves in 32
    bits stays so, but for the blocks' norms, whose weights are rounded.
    """
    mesh = init_device_mesh(torch.device(group.device or "cpu").type, (group.size,))
    kind = None if precision == "f32" else DTYPES[precision]
    for block in model.model.layers:
        policy = MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=torch.float32, cast_forward_inputs=False)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    # The head's weight is used after `hidden`, and outside of the module (train/objective.py): it is not to be let go.
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    register_fsdp_forward_method(model, "hidden")
    for module in model.modules():
        if isinstance(module, FSDPModule):  # the loop divides by the step's weight; processes add
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return mesh


def _rows(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    """This process's share of a tensor, as fully_shard cuts it, and nothing of the rest."""
    parts = whole.chunk(mesh.size())
    rank = mesh.get_local_rank()
    mine = parts[rank] if rank < len(parts) else whole[:0]
    mine = mine.clone().to(mesh.device_type)
    return DTensor.from_local(mine, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
