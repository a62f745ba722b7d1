"""The CPU engine: kernels and the forward pass in C++ (src/native), here made into a Backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pronk.engine.declaration import Engine, Plan
from pronk.formats import WITH_OUTLIERS, names

if TYPE_CHECKING:
    from pronk.checkpoint.tensors import Checkpoint
    from pronk.cpu_engine.backend import CpuBackend


class CpuEngine(Engine):
    name, title = "cpu", "CPU engine"
    formats = ("auto", *names(engine="cpu"))
    compared = ("llm-int8", "q8", "q4")
    mixes = True
    options: ClassVar = {"int8_threshold": WITH_OUTLIERS, "int8_outliers": WITH_OUTLIERS, "kv_dtype": ()}
    devices = ("cpu",)
    batch_invariant = True
    has_pack_cache = True

    def load(self, checkpoint: Checkpoint, **options: Any) -> CpuBackend:
        from pronk.cpu_engine.backend import CpuBackend

        return CpuBackend.from_checkpoint(checkpoint, **options)

    def plan(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> Plan:
        from pronk.cpu_engine.plan import plan

        return plan(checkpoint, options.get("quantize") or "auto", options.get("kv_dtype"))

    def prepare(self) -> None:
        from pronk.cpu_engine.backend import load_native

        load_native()


ENGINE = CpuEngine()
