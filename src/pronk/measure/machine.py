"""The machine that figures come from, and all else that they depend on: without it they mean nothing."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import Any

from pronk import __version__, system
from pronk.checkpoint.hub.local import digest
from pronk.checkpoint.tensors import Checkpoint
from pronk.errors import BadFile, os_problem
from pronk.llm import LLM


def provenance(
    checkpoint: Checkpoint, text: str | None, command: str, ran: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What figures of a model on a text come from, as every JSON of measurements has it under this name.

    Keys: pronk, its version; commit, of the checkout that it runs from, with "+" where files differ from it (None:
    from none); command; made; machine (see `machine`; and the threads and the instruction set of what `ran`, as a
    Backend's `conditions` says them); versions of
    numpy, torch (None: not installed) and the compiler of the kernels; model_sha256, of each file by its name; and
    text_sha256, of the text in UTF-8. Raises BadFile where a file cannot be read.
    """
    return {
        "pronk": __version__,
        "commit": commit(Path(__file__).parent),
        "command": command,
        "made": now(),
        "machine": {**machine(), **(ran or {"threads": None, "isa": None})},
        "versions": {"numpy": _version("numpy"), "torch": _version("torch"), "compiler": compiler()},
        "model_sha256": {path.name: _sha256(path) for path in sorted(checkpoint.files)},
        "text_sha256": None if text is None else hashlib.sha256(text.encode()).hexdigest(),
    }


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def described(llm: LLM) -> dict[str, Any]:
    """What ran; "dtype" is what most of its weights are."""
    backend = llm.backend
    return {"model": llm.name, "engine": backend.engine, "device": backend.device, "dtype": backend.dtype}


def commit(folder: Path) -> str | None:
    """Of the git checkout that tracks what lies in `folder`."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        if not git("ls-files", "."):
            return None  # it only lies within another project's, in an environment of packages
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


@cache
def compiler() -> str | None:
    """That built the kernels, as it signed them; None where it left no signature."""
    found = util.find_spec("pronk._native")
    if found is None or not found.origin:
        return None
    signed = re.search(rb"(GCC: \([ -~]{1,80}|[ -~]{0,20}clang version [ -~]{1,80})", Path(found.origin).read_bytes())
    return signed[1].decode() if signed else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _sha256(path: Path) -> str:
    try:
        return digest(path, hashlib.sha256())
    except OSError as error:
        raise BadFile(path, f"cannot be read: {os_problem(error)}") from None


def machine() -> dict[str, Any]:
    """Processor, cores that this process may use, memory in bytes, system, Python, and the load when it was asked."""
    return {
        "cpu": _processor(),
        "cores": system.processors(),
        "memory_bytes": system.whole_memory(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "load": load(),
    }


def _processor() -> str:
    """Its name, and where the system tells them family and model: a virtual machine's name is that of many."""
    name = system.said("cpuinfo", "model name") or platform.processor() or platform.machine()
    numbers = [(key, system.said("cpuinfo", key)) for key in ("cpu family", "model\t")]
    told = ", ".join(f"{key.removeprefix('cpu ').strip()} {number}" for key, number in numbers if number)
    return f"{name} ({told})" if told else name


def load() -> float | None:
    """Of the last minute: how many processes wanted to run at once. None where the system does not say."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
