"""The processes that share a run: one alone, or as many as torchrun started, each with a device of its own.

Each computes every size-th micro-batch of a step, and holds its share of the weights, gradients and the optimizer's
state (sharding.py). What loop and run ask of the group is the same for one process, for which it comes to nothing.
Only the first writes and speaks; what it fails at, all fail at.
"""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pronk.errors import BadRequest, PronkError

T = TypeVar("T")
Whole = Callable[[Tensor], Tensor]  # a parameter, gathered from all that hold parts of it

TIMEOUT = timedelta(minutes=30)  # the first may be busy for long, with samples say, while the others wait
_LOST = "another process of this run has ended, or did not answer; go on with the same command and --resume"
_GLOO_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")


class Lost(PronkError):
    """Another process is gone: what it died of it may have said, or not."""


class SaidAlready(PronkError):
    """What ended the run has been said by another process."""


class Group:
    """One process, alone."""

    rank, size, here = 0, 1, 1  # `here`: how many of them share this machine
    device: str | None = None  # None: whatever was asked for

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This process's: every size-th."""
        return items[self.rank :: self.size]

    def sum(self, *values: float) -> list[float]:
        """Of each value over all processes, in float64 and in order: the same bits everywhere."""
        return list(values)

    def any(self, flag: bool) -> bool:
        return bool(self.sum(flag)[0])

    def agree(self, value: object, what: str) -> None:
        """Raises BadRequest where the processes have different ones."""

    def gather(self, mine: Sequence[T]) -> list[T]:
        """All processes', one process's after the other's."""
        return list(mine)

    def lead(self, work: Callable[[Whole], T], model: nn.Module | None = None) -> T | None:
        """What the first does alone, while the others wait; its error is raised on all of them.

        It may ask for parameters of `model` as wholes, one at a time: the others then lend their parts.
        """
        return work(self.whole)

    def whole(self, part: Tensor) -> Tensor:
        """Gathered by all at once."""
        return part

    def seed(self, seed: int) -> None:
        """Random numbers that no other process has: dropout's. One process goes on with those it has begun."""

    def reduce(self, model: nn.Module, *, last: bool) -> None:
        """Before the backward pass of a step's last micro-batch, or of another."""

    def rest(self, model: nn.Module) -> None:
        """After forward passes that no backward pass followed: let go of what was gathered for them."""


class Processes(Group):
    """Several, of torch.distributed's default group, whose CPU side is gloo."""

    def __init__(self, device: str) -> None:
        self.rank, self.size, self.device = dist.get_rank(), dist.get_world_size(), device
        self.here = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))

    def sum(self, *values: float) -> list[float]:
        mine = torch.tensor(values, dtype=torch.float64)
        every = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(every, mine)
        return [float(total) for total in sum(every[1:], every[0])]

    def agree(self, value: object, what: str) -> None:
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, value)
        if any(other != every[0] for other in every):
            raise BadRequest(f"the processes of this run have different {what}; give all of them the same")

    def gather(self, mine: Sequence[T]) -> list[T]:
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, list(mine))
        return [one for of_one in every for one in of_one]

    def lead(self, work: Callable[[Whole], T], model: nn.Module | None = None) -> T | None:
        parameters = list(model.parameters()) if model else []
        if not self.first:
            while isinstance(heard := _broadcast(None), int):
                self.whole(parameters[heard])
            if heard is not None:
                raise PronkError(heard)
            return None
        numbers = {id(parameter): number for number, parameter in enumerate(parameters)}

        def whole(parameter: Tensor) -> Tensor:
            _broadcast(numbers[id(parameter)])
            return self.whole(parameter)

        try:
            result = work(whole)
        except BaseException as error:
            _broadcast(str(error) or type(error).__name__)
            raise
        _broadcast(None)
        return result

    def whole(self, part: Tensor) -> Tensor:
        gathered: Tensor = part.detach().full_tensor()  # type: ignore[attr-defined]
        return gathered

    def seed(self, seed: int) -> None:
        drawn = np.random.SeedSequence([seed, self.rank]).generate_state(1, np.uint64)
        torch.manual_seed(int(drawn[0]))

    def reduce(self, model: nn.Module, *, last: bool) -> None:
        """Thin gradients are summed once a step. All weights' are at once: whole, they would fill each process.

        That is one reduce-scatter beside the two all-gathers that a micro-batch takes in any case.
        """
        thin = any(not parameter.requires_grad for parameter in model.parameters())
        model.set_requires_gradient_sync(last or not thin)  # type: ignore[operator]

    def rest(self, model: nn.Module) -> None:
        model.reshard()  # type: ignore[operator]


def _broadcast(said: Any) -> Any:
    """What the first said."""
    message = [said]
    dist.broadcast_object_list(message, device=torch.device("cpu"))
    return message[0]


def started() -> bool:
    """Whether torchrun started this process and others."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def joined(device: str | None = None) -> Iterator[Group]:
    """The group that torchrun made this process part of, or one of its own.

    Raises Lost where another process is gone. Whatever error it is that ends the run, one process alone raises that;
    all others SaidAlready. `device`: cpu or cuda, and which GPU is torchrun's to say; None: GPUs, where there are any.
    """
    if not started():
        yield Group()
        return
    device = _device(device)
    if device != "cpu":
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl", timeout=TIMEOUT)
    failed = False
    try:
        yield Processes(device)
    except Exception as error:
        problem = Lost(_LOST) if is_loss(error) else error
        failed = isinstance(problem, PronkError)
        if failed and not _says_it():
            raise SaidAlready(str(problem)) from None
        raise problem from None
    else:
        atexit.register(_let_go)
    finally:
        if not failed:  # or the others would hear of it, and torchrun end this one, before its line is said
            dist.destroy_process_group()


def _let_go() -> None:
    """Ends gloo's threads while Python is whole.

    They end with the last that holds the group, and DTensor's caches hold meshes, which hold it, for good (torch 2.13).
    One that lets go of a tensor while the interpreter ends aborts the process (pytorch/pytorch#179291). After an error
    it is left to chance: such a thread may wait for a process that is gone, and to end it is to wait as long.
    """
    for mesh in [held for held in gc.get_objects() if type(held) is DeviceMesh]:
        vars(mesh).get("_pg_registry", {}).clear()
    gc.collect()  # models, which hold it as well, are cycles


def is_loss(error: BaseException) -> bool:
    """Whether it comes of another process that is gone."""
    return isinstance(error, Lost | dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in _GLOO_LOST)
    )


def _device(name: str | None) -> str:
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise BadRequest(f"device {name!r}: torchrun gives each process its own; ask for cpu or cuda")
    if name == "cuda" and (here := int(os.environ["LOCAL_WORLD_SIZE"])) > (devices := torch.cuda.device_count()):
        raise BadRequest(
            f"torchrun started {here} processes here, and torch sees {devices} CUDA devices; start as many"
        )
    return name if name == "cpu" else f"cuda:{os.environ['LOCAL_RANK']}"


def _says_it() -> bool:
    """Whether no other process has said yet what the run ended with."""
    try:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return bool(dist.distributed_c10d._get_default_store().add(f"pronk/said/{attempt}", 1) == 1)
    except RuntimeError:  # the store went with the process that kept it
        return True
