"""Engine: what an engine says of itself before anything of it is imported. Each is declared in its own folder.

It costs nothing to ask: no numpy, no torch. What imports an engine does so inside a method.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from pronk.checkpoint.tensors import Checkpoint
    from pronk.engine.backend import Backend


@dataclass(frozen=True)
class Plan:
    """What running a checkpoint will take. Bytes."""

    dtype: str  # what most weights are
    weights: int
    kv_dtype: str
    kv_a_token: int
    besides: int  # about: what a forward pass needs, and what else there is at the peak


class Engine(ABC):
    name: ClassVar[str]  # that it is asked for by
    title: ClassVar[str]  # in prose
    formats: ClassVar[tuple[str, ...]]  # of weights, that `quantize` may name
    compared: ClassVar[tuple[str, ...]]  # of these, what is compared with the original where nothing is named
    mixes: ClassVar[bool] = False  # whether `quantize` may be a mapping
    # Of pronk.load, those that not every engine has, and the formats that each concerns; none named: all of them.
    options: ClassVar[Mapping[str, tuple[str, ...]]]
    devices: ClassVar[tuple[str, ...]]  # kinds: what `device` may be, or begin with before a colon
    batch_invariant: ClassVar[bool]  # see Backend
    has_pack_cache: ClassVar[bool] = False  # whether `load` takes pack_cache

    @abstractmethod
    def load(self, checkpoint: Checkpoint, **options: Any) -> Backend:
        """`options`: those given of its own and of every engine's. Raises PronkError where it is not installed."""

    @abstractmethod
    def plan(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> Plan:
        """Before anything is read. `options`: of pronk.load. Raises BadRequest for a format that there is not."""

    @abstractmethod
    def prepare(self) -> None:
        """Take what every model of it takes once: its libraries, and their tables. Raises PronkError as `load`."""

    def has_gpu(self) -> bool:
        """Whether it would run on one, so that it is to be preferred."""
        return False

    def free_memory(self, device: str | None) -> int | None:
        """Bytes, where weights will lie; None where that is not known."""
        from pronk import system

        return system.free_memory()
