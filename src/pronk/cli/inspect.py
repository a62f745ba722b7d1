"""`pronk inspect`: what a checkpoint says about itself. Of its tensors it reads a few rows, which tell of a grid."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from pronk.cli import console, options
from pronk.cli.verb import verb
from pronk.system import human_size

if TYPE_CHECKING:
    from pronk.checkpoint.grid import Grid
    from pronk.checkpoint.tensors import Checkpoint, LazyTensor
    from pronk.engine.declaration import Plan


@verb(
    epilog="""\b
Examples:
  pronk inspect smollm2:135m
  pronk inspect ./Llama-2-7b            how many shards it has, how much memory loading takes
  pronk inspect model.gguf --json | jq .config"""
)
@options.model_argument
@options.revision_option
@options.json_option
def command(model: str, revision: str | None, as_json: bool) -> None:
    """Show format, config, tokenizer, memory need and tensors.

    It reads only a few rows of weights, to see whether they were in a smaller format before (the line "grid").
    Layers that are alike are one line, with the bytes of one; --json has each tensor.
    """
    from pronk import checkpoint
    from pronk.checkpoint.hub import resolve as hub

    opened = checkpoint.open(hub.resolve(model, revision=revision))
    if as_json:
        console.write_json(_as_json(model, opened))
    else:
        console.write(_as_text(model, opened) + "\n")


_F32 = 4  # bytes: what the torch engine loads weights as on CPUs


def _cpu_plan(opened: Checkpoint) -> Plan | None:
    """None where the native module is missing: a checkpoint can be looked at all the same."""
    from pronk.cpu_engine.plan import plan
    from pronk.errors import PronkError

    try:
        return plan(opened)
    except PronkError:
        return None


def _cpu_types(opened: Checkpoint) -> list[str]:
    """What matrices are packed as, those of the most weights first: blocks of GGUF's by their types' names."""
    from pronk.checkpoint.containers.gguf_blocks import BLOCK_TYPES
    from pronk.cpu_engine.slots import slots

    counts: Counter[str] = Counter()
    for slot in slots(opened, "auto"):
        for tensor in (opened.tensors[name] for name in slot.tensors):
            kept = tensor.dtype in BLOCK_TYPES and slot.format.holds(tensor.dtype)
            counts[tensor.dtype if kept else slot.format.kind_of or slot.format.name] += math.prod(tensor.shape)
    return [name for name, _ in counts.most_common()]


def _grid(opened: Checkpoint) -> Grid | None:
    """None as well where weights are broken: what else there is can be shown all the same."""
    from pronk.checkpoint import grid
    from pronk.errors import PronkError

    try:
        return grid.find(opened)
    except PronkError as error:
        console.note(f"the weights were not looked at: {error}")
        return None


def _parameters(opened: Checkpoint) -> int:
    return sum(math.prod(tensor.shape) for tensor in opened.tensors.values())


def _tensors(opened: Checkpoint) -> list[LazyTensor]:
    """Layer 2 before layer 10, in whichever order the files have them."""

    def natural(tensor: LazyTensor) -> list[tuple[bool, int, str]]:
        return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in tensor.name.split(".")]

    return sorted(opened.tensors.values(), key=natural)


def _folded(tensors: list[LazyTensor]) -> list[tuple[str, str, str, str]]:
    """Rows of a table. From three layers on that are alike, one row is all of them's: `model.layers.0-29.mlp...`."""
    runs: list[tuple[str, int, int, list[LazyTensor]]] = []  # a name around its layer, first and last layer
    open_runs: dict[str, int] = {}  # where a name's latest run is
    for tensor in tensors:
        parts = tensor.name.split(".")
        at = next((n for n, part in enumerate(parts) if part.isdigit()), None)
        around = ".".join(part if n != at else "{}" for n, part in enumerate(parts))
        layer = -1 if at is None else int(parts[at])
        where = open_runs.get(around)
        if where is not None:
            name, first, last, alike = runs[where]
            if layer == last + 1 and (tensor.shape, tensor.dtype) == (alike[0].shape, alike[0].dtype):
                runs[where] = (name, first, layer, [*alike, tensor])
                continue
        open_runs[around] = len(runs)
        runs.append((around, layer, layer, [tensor]))

    def row(name: str, tensor: LazyTensor) -> tuple[str, str, str, str]:
        return name, " x ".join(map(str, tensor.shape)), tensor.dtype, f"{tensor.nbytes:,}"

    rows = []
    for around, first, last, alike in runs:
        names = [each.name for each in alike] if len(alike) < 3 else [around.format(f"{first}-{last}")]
        rows += [row(name, tensor) for name, tensor in zip(names, alike, strict=False)]
    return rows


def _config(opened: Checkpoint) -> dict[str, Any]:
    foreign = ("architectures", "model_type", "hidden_act")  # the same for every model pronk reads
    return {key: value for key, value in opened.config.to_dict().items() if key not in foreign}


def _as_json(model: str, opened: Checkpoint) -> dict[str, Any]:
    plan, source, cpu = opened.plan(_F32, head_apart=True), opened.tokenizer, _cpu_plan(opened)
    grid = _grid(opened)
    return {
        "model": model,
        "path": str(opened.path),
        "format": opened.format,
        "parameters": _parameters(opened),
        "quantization": opened.quantization,
        "grid": grid and grid.as_dict(),
        "int8_threshold": opened.int8_threshold,
        "config": opened.config.to_dict(),
        "tokenizer": source and {
            "kind": source.kind, "path": str(source.path), "chat_template": source.chat_template is not None
        },
        "files": [str(file) for file in opened.files],
        "plan": {
            "engine": "torch", "type": "f32", "files": plan.files, "stored_bytes": plan.stored,
            "loaded_bytes": plan.loaded, "peak_bytes": plan.peak,
        },
        "cpu_plan": cpu and {
            "type": cpu.dtype, "types": _cpu_types(opened), "weight_bytes": cpu.weights,
            "kv_type": cpu.kv_dtype, "kv_bytes_a_token": cpu.kv_a_token,
        },
        "tensors": [
            {"name": t.name, "shape": list(t.shape), "type": t.dtype, "bytes": t.nbytes}
            for t in _tensors(opened)
        ],
    }  # fmt: skip


def _as_text(model: str, opened: Checkpoint) -> str:
    plan, source, cpu = opened.plan(_F32, head_apart=True), opened.tokenizer, _cpu_plan(opened)
    template = "chat template" if source and source.chat_template else "no chat template"
    head = [
        ("model", model),
        ("path", opened.path),
        ("format", opened.format),
        ("parameters", f"{_parameters(opened):,}"),
        ("quantization", opened.quantization or "none"),
        ("grid", _grid(opened) or "none found"),
        ("tokenizer", f"{source.kind}, {template}" if source else "none"),
        ("files", f"{plan.files}, {human_size(plan.stored)} of weights"),
        (
            "CPU engine",
            f"{human_size(cpu.weights)} in {', '.join(_cpu_types(opened))}; a KV cache of "
            f"{cpu.kv_a_token / 1e3:.1f} kB per token in {cpu.kv_dtype}"
            if cpu
            else "not installed",
        ),
        (
            "torch engine",
            f"{human_size(plan.loaded)} in f32, peak {human_size(plan.peak)} while loading; in 16 bits half of it",
        ),
    ]
    config = [(key, json.dumps(value)) for key, value in _config(opened).items()]
    tensors = [("tensor", "shape", "type", "bytes"), *_folded(_tensors(opened))]
    return "\n\n".join([console.table(head), console.table(config), console.table(tensors, right=(3,))])
