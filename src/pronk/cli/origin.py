"""What a model was made of: `pronk merge` writes it beside the weights, or into a GGUF file where it is a name and no
path; a run that trained all weights has run.yaml.

`pronk quantize` measures against it how much of what was learned a format keeps, without being told.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pronk.errors import BadFile

_RUN, _MODEL = "run.yaml", "model"  # a run's, and in its folder the model


def write(folder: Path, base: str, parts: list[str]) -> None:
    """`base`: as it was typed; of a path the whole."""
    import yaml

    from pronk.checkpoint.writers.safetensors import ORIGIN

    said = yaml.safe_dump({"base": _whole(base), "others": [_whole(part) for part in parts]}, allow_unicode=True)
    head = "# What pronk merge made this of; pronk quantize measures against the base how much of it a format keeps.\n"
    (folder / ORIGIN).write_text(head + str(said), encoding="utf-8", errors="backslashreplace", newline="\n")


def base_of(src: str) -> str | None:
    """What a model on this machine was made of, as far as its folder or file says. Raises BadFile."""
    from pronk.checkpoint.containers.gguf_file import MAGIC, open_file
    from pronk.checkpoint.containers.mapped import first_bytes
    from pronk.checkpoint.writers.gguf import BASE
    from pronk.checkpoint.writers.safetensors import ORIGIN
    from pronk.system import expanded

    folder = expanded(src)
    if first_bytes(folder, len(MAGIC)) == MAGIC:
        name = open_file(folder).metadata.get(BASE)
        return name if isinstance(name, str) and name else None
    if (merged := folder / ORIGIN).is_file():
        return _said(merged, "base")
    folder = folder.resolve()
    run = folder.parent / _RUN
    return _said(run, "model") if folder.name == _MODEL and run.is_file() else None


def is_here(name: str) -> bool:
    """Whether it can be opened without a download."""
    from pronk.checkpoint.hub import resolve
    from pronk.system import expanded

    return expanded(name).exists() or any(model.name == name and model.path for model in resolve.cached())


def _said(path: Path, key: str) -> str | None:
    from pronk.cli.recipe import members

    found: Any = next((node.value for name, node in members(path) if name == key), None)
    if found is not None and not (isinstance(found, str) and found):
        raise BadFile(path, f"{key} must be a name")
    return found


def _whole(name: str) -> str:
    from pronk.system import expanded

    path = expanded(name)
    return str(path.resolve()) if path.exists() else name
