"""Which engine runs a model: the one asked for, or the one that the options or the machine call for."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pronk import formats
from pronk.checkpoint.tensors import Checkpoint, Progress
from pronk.errors import BadRequest, PronkError

if TYPE_CHECKING:
    from pronk.engine.backend import Backend

Engine = Literal["cpu", "torch"]
_SHARED = ("quantize", "int8_threshold", "int8_outliers")
_OWN: dict[Engine, tuple[str, ...]] = {"cpu": ("kv_dtype",), "torch": ("device", "dtype", "attn")}
# Formats that one engine alone has call for it; the torch engine has floats by `dtype`.
_QUANTIZE: dict[Engine, set[str]] = {
    "cpu": {"auto", *formats.FLOATS} | set(formats.names(engine="cpu")) - set(formats.names(engine="torch")),
    "torch": set(formats.names(engine="torch")) - set(formats.names(engine="cpu")),
}


def choose(engine: str | None, options: Mapping[str, Any]) -> Engine:
    """`options` of either engine, None where not given. Raises BadRequest where an engine lacks one that is."""
    if engine not in (None, "cpu", "torch"):
        raise BadRequest(f"engine must be cpu or torch, not {engine!r}")
    given: dict[Engine, list[str]] = {
        known: [name for name in names if options[name] is not None] for known, names in _OWN.items()
    }
    quantize = options["quantize"]
    for known, alone in _QUANTIZE.items():
        if isinstance(quantize, str) and quantize in alone:
            given[known].append(f"quantize={quantize!r}")
    if isinstance(quantize, Mapping):
        given["cpu"].append("quantize for single tensors")
    if options["device"] == "cpu":  # which both engines know
        given["torch"].remove("device")
    if engine is None and given["cpu"] and given["torch"]:
        ours, others = given["cpu"][0], given["torch"][0]
        raise BadRequest(f"{ours} is an option of the CPU engine and {others} one of the torch engine; leave one out")
    wanted: Engine = "torch" if engine == "torch" or (engine is None and given["torch"]) else "cpu"
    if engine is None and not given["cpu"] and options["device"] is None and has_gpu():
        wanted = "torch"
    other: Engine = "cpu" if wanted == "torch" else "torch"
    if given[other]:
        raise BadRequest(f"the {wanted} engine has no {given[other][0]}; leave it out, or take engine={other!r}")
    return wanted


def has_gpu() -> bool:
    """Whether torch sees a GPU; it is asked only where there may be one, for importing it takes seconds."""
    driver = {"linux": "/proc/driver/nvidia/version", "win32": r"C:\Windows\System32\nvcuda.dll"}.get(sys.platform)
    amd = sys.platform == "linux" and Path("/dev/kfd").exists()
    if not (amd or (driver and Path(driver).exists())) or find_spec("torch") is None:
        return False
    import_torch()
    from pronk.torch_engine.backend import pick_device

    return pick_device(None).type != "cpu"


def backend(
    checkpoint: Checkpoint,
    engine: Engine,
    options: Mapping[str, Any],
    *,
    threads: int | None,
    ctx_size: int | None,
    progress: Progress | None,
) -> Backend:
    own = {name: options[name] for name in (*_OWN[engine], *_SHARED) if options[name] is not None}
    if engine == "cpu":
        from pronk.cpu_engine.backend import CpuBackend

        return CpuBackend.from_checkpoint(checkpoint, **own, threads=threads, ctx_size=ctx_size, progress=progress)
    import_torch()
    from pronk.torch_engine.backend import TorchBackend

    return TorchBackend.from_checkpoint(checkpoint, **own, threads=threads, ctx_size=ctx_size, progress=progress)


def import_torch() -> None:
    """Raises PronkError where there is none."""
    try:
        import_module("pronk.torch_engine.backend")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise PronkError("the torch engine needs torch; install it with: pip install 'torch>=2.10'") from None
