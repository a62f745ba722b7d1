"""A share of a tensor is what fully_shard would give: in one process that takes itself for any one of four."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from pronk.train import sharding

PROCESSES = 4


@pytest.fixture(params=range(PROCESSES))
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """In a group that talks to nobody."""
    distributed.init_process_group("fake", rank=request.param, world_size=PROCESSES, store=FakeStore())
    yield request.param
    distributed.destroy_process_group()


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 6, 9])
def test_shares_are_those_of_fully_shard(rank: int, rows: int) -> None:
    """Five rows are 2, 2, 1 and none."""
    mesh = init_device_mesh("cpu", (PROCESSES,))
    layer = nn.Linear(3, rows, bias=False)
    whole = torch.arange(3.0 * rows).view(rows, 3)
    with torch.no_grad():
        layer.weight.copy_(whole)
    fully_shard(layer, mesh=mesh)
    theirs, ours = layer.weight, sharding._rows(whole, mesh)
    assert isinstance(theirs, DTensor)
    assert (ours.shape, ours.stride(), ours.placements) == (theirs.shape, theirs.stride(), theirs.placements)
    assert torch.equal(ours.to_local(), theirs.to_local())
