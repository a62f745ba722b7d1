"""The torch engine: the reference implementation, for CPUs and CUDA GPUs, inference and training."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pronk.engine.declaration import Engine, Plan
from pronk.errors import PronkError
from pronk.formats import FLOATS, FORMATS, WITH_OUTLIERS, names

if TYPE_CHECKING:
    from pronk.checkpoint.tensors import Checkpoint
    from pronk.torch_engine.backend import TorchBackend

CODED = tuple(name for name in names(engine="torch") if name not in FLOATS)


class TorchEngine(Engine):
    name, title = "torch", "torch engine"
    formats = names(engine="torch")
    compared = ("llm-int8", "int8")
    options: ClassVar = {
        "int8_threshold": WITH_OUTLIERS, "int8_outliers": WITH_OUTLIERS, "device": (),
        "compute_dtype": CODED, "attn": (), "batch_invariant": (),
    }  # fmt: skip
    devices = ("cpu", "cuda")
    batch_invariant = False

    def load(self, checkpoint: Checkpoint, **options: Any) -> TorchBackend:
        import_torch()
        from pronk.torch_engine.backend import TorchBackend

        return TorchBackend.from_checkpoint(checkpoint, **options)

    def plan(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> Plan:
        from pronk.torch_engine.plan import plan

        return plan(checkpoint, options)

    def prepare(self) -> None:
        import_torch()
        from pronk.torch_engine import device_memory

        device_memory.settle()

    def has_gpu(self) -> bool:
        """It is asked only where there may be one, for importing torch takes seconds."""
        from importlib.util import find_spec

        driver = {"linux": "/proc/driver/nvidia/version", "win32": r"C:\Windows\System32\nvcuda.dll"}.get(sys.platform)
        amd = sys.platform == "linux" and Path("/dev/kfd").exists()
        if not (amd or (driver and Path(driver).exists())) or find_spec("torch") is None:
            return False
        import_torch()
        from pronk.torch_engine.backend import pick_device

        return pick_device(None).type != "cpu"

    def free_memory(self, device: str | None) -> int | None:
        if device == "cpu" or not self.has_gpu():
            return super().free_memory(device)
        from pronk.torch_engine import device_memory

        return device_memory.free(device)


ENGINE = TorchEngine()


def grouped(format: str | None) -> bool:
    """Whether it is codes in groups along rows, of which the weights alone are made; else of a scheme of formats.int8,
    or floats."""
    codes = FORMATS[format].codes if format else None
    return codes is not None and codes.group is not None


def import_torch() -> None:
    """Raises PronkError where there is none."""
    try:
        import_module("pronk.torch_engine.backend")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise PronkError("the torch engine needs torch; install it with: pip install 'torch>=2.10'") from None
