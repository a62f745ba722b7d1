"""Memory of a run, foretold: its step is rehearsed on tensors that have a shape and a type, but no bytes.

What is rehearsed is the run's own step (loop.py) over the largest micro-batch that it will see, with its optimizer,
precision, recomputation and frozen codes: there is no second description of what training keeps, which could be wrong.
No weight is read. What is counted, and how, is in ledger.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, count, islice
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pronk import system
from pronk.checkpoint.tensors import Checkpoint
from pronk.torch_engine import device_memory
from pronk.torch_engine.model import Llama
from pronk.train import codes, frozen, lora
from pronk.train.data.batches import Batches, filled
from pronk.train.data.store import lengths
from pronk.train.interrupt import held_back
from pronk.train.ledger import KINDS, Ledger
from pronk.train.loop import Loop
from pronk.train.recompute import recompute
from pronk.train.settings import Settings
from pronk.train.unread import Unread

# Of a process on a CPU, besides tensors; calibrated on Linux with torch 2.13 and glibc 2.39.
LIBRARIES = 60 << 20  # what torch loads and keeps from its first step on
# Of what comes and goes in a step: what products take for themselves, and holes between tensors. Where passes differ in
# length, what one leaves fits the next badly: holes grow over some 30 steps, and then no more.
SCRATCH, SCRATCH_OF_LENGTHS = 0.15, 0.9
_LOOKED_AT = 100_000  # passes, to find the largest

# What takes less, of the options of fine-tuning.
LESS = (
    "--recompute 1, a smaller --batch-size, --pack or --max-length, --precision bf16, LoRA alone (without --full) with "
    "weights in fewer bits (--quantize q4), --optimizer adamw8bit or adafactor"
)


@dataclass(frozen=True)
class Plan:
    """Bytes, of the process; on a GPU, of what torch holds there."""

    name: str  # of the checkpoint
    device: str
    trained: int  # parameters
    weights: int  # parameters in all
    tokens: int  # of the largest micro-batch
    process: int  # what there is besides tensors: Python, torch, the data
    loading: int  # tensors, at most, while weights are read
    most: Mapping[str, int]  # in a step, of each of ledger.KINDS by itself
    at_peak: Mapping[str, int]  # of each, when there is most of all together
    scratch: int  # what operations take for themselves, and holes between tensors
    held: int  # what the process holds already
    free: int | None  # besides

    @property
    def in_a_step(self) -> int:
        return self.process + sum(self.at_peak.values()) + self.scratch

    @property
    def total(self) -> int:
        return max(self.process + self.loading, self.in_a_step)

    @property
    def fits(self) -> bool | None:
        """None where nobody knows what is free."""
        return None if self.free is None else self.total <= self.held + self.free

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "total": self.total, "fits": self.fits}

    def check(self, here: int = 1, size: int = 1) -> None:
        """Raise NotEnoughMemory where it does not fit. `here` of the `size` processes of a run are on this
        machine; all cut among them what lasts."""
        lasting = sum(self.at_peak[kind] for kind in ("parameters", "gradients", "optimizer"))
        needed = (self.total - lasting + lasting // size) * (here if self.held else 1) - self.held
        if self.free is not None and needed > self.free:
            way_out = f"choose a smaller model, or what takes less: {LESS}; --plan says how much"
            system.check_memory(needed, f"{self.name}: training it", way_out, free=self.free)


def plan(checkpoint: Checkpoint, settings: Settings, examples: Sequence[Any], device: torch.device) -> Plan:
    """Of training on `examples`, as Data has them."""
    on_cpu = device.type == "cpu"
    batch = largest(settings, examples)
    with held_back(), FakeTensorMode(), Unread():
        loop = _loop(checkpoint, settings, batch, device)
        loop.prepare(batch)
        trained = [parameter for parameter in loop.model.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)
        loop.optimizer.step()  # which makes its state
        if settings.accumulate == 1:  # else there are those of earlier micro-batches
            loop.optimizer.zero_grad()
        with Ledger(loop.model, loop.optimizer, checkpoint.config.vocab_size) as ledger:
            loop.step()
        weights = frozen.count(loop.model)
    held = (system.held_memory() or 0) if on_cpu else 0  # with what the rehearsal loaded: the run needs it, too
    free = system.free_memory() if on_cpu else device_memory.free(str(device))
    scratch = SCRATCH_OF_LENGTHS if _differ(settings, examples) else SCRATCH
    passing = ledger.at_peak["activations"] + ledger.at_peak["logits"]
    widest = 4 * max(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())
    return Plan(
        name=str(checkpoint.path),
        device=str(device),
        trained=sum(parameter.numel() for parameter in trained),
        weights=weights,
        tokens=sum(map(len, batch)),
        process=held + LIBRARIES if on_cpu else 0,
        loading=codes.nbytes(checkpoint, settings.quantize if settings.lora else "f32") + widest,  # before lora.narrow
        most={kind: ledger.most[kind] for kind in KINDS},
        at_peak={kind: ledger.at_peak[kind] for kind in KINDS},
        scratch=widest + round(scratch * passing) if on_cpu else 0,
        held=held,
        free=free,
    )


def largest(settings: Settings, examples: Sequence[Any]) -> list[Any]:
    """The examples of the pass with the most tokens of all that the run will make."""
    known = lengths(examples)
    chosen = max(_passes(settings, examples), key=lambda indices: sum(known[i] for i in indices))
    return [examples[i] for i in chosen]


def _differ(settings: Settings, examples: Sequence[Any]) -> bool:
    """Whether not all passes read one number of tokens."""
    known = lengths(examples)
    return len({filled(sum(known[i] - 1 for i in one)) for one in _passes(settings, examples)}) > 1


def _passes(settings: Settings, examples: Sequence[Any]) -> Iterator[list[int]]:
    """Those of a run, as examples' indices; of many the first."""
    batches = settings.batches(examples)
    every = chain.from_iterable(batches.epoch(number) for number in count())
    steps = (list(islice(every, settings.accumulate)) for _ in range(settings.steps(batches)))
    return islice(chain.from_iterable(map(batches.passes, steps)), _LOOKED_AT)


def _loop(checkpoint: Checkpoint, settings: Settings, batch: Sequence[Any], device: torch.device) -> Loop:
    """A run's loop (trainer.py), with one micro-batch a step."""
    with device:
        model = Llama(checkpoint.config)
        if settings.lora:
            frozen.outline(model, checkpoint, settings.quantize)
            lora.add(model, settings.lora)
    recompute(model, settings.recompute)
    return Loop.of(settings, model, batch, Batches([len(example) for example in batch], len(batch)))
