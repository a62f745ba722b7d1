"""What the `quantization_config` of a config.json says, and the tensors that it says it of.

Two of its methods keep a matrix as int8 codes with one scale an output row, which pronk computes with as they are:

- bitsandbytes in 8 bits (LLM.int8(), arXiv 2208.07339): `X.weight`, int8 [N, K], and `X.SCB`, float32 [N], the largest
  magnitude of each row: scale = SCB / 127;
- compressed-tensors "int-quantized" (W8A8): `X.weight`, int8 [N, K], and `X.weight_scale` [N, 1] or [N]; and where its
  `transform_config` has Hadamard transforms of what a module reads, in blocks as formats.turn has them, the codes are
  of turned rows.

Which matrices are quantized is told by how they are stored, an int8 matrix beside its scale, for nothing else can be
meant by that. So patterns of modules to leave out, which are regular expressions and cost whatever their author likes,
are never run; modules left out by name are held against what is stored. Whatever else would change the mathematics is
refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from pronk.checkpoint.readers import int8_rows
from pronk.checkpoint.readers.int8_rows import LAYOUTS, Layout
from pronk.checkpoint.tensors import LazyTensor
from pronk.errors import BadFile, Unsupported, short
from pronk.formats.quantize import INT8_THRESHOLD
from pronk.formats.turn import together

WAY_OUT = "use the weights that were not quantized, or a GGUF file"

# Keys that say how a quantization was come by, or how some program is to run it.
_HISTORY = frozenset("version global_compression_ratio run_compressed dequantize use_optimized_inference".split())
_ARGS_HISTORY = frozenset("observer observer_kwargs scale_dtype zp_dtype".split())
_TURNED = LAYOUTS["TURNED_INT8"]
_PRESETS = ("W8A8", "INT8")  # names that compressed-tensors has for the layout below


@dataclass(frozen=True)
class Quantization:
    layout: Layout
    left_out: frozenset[str]  # modules that it names as not quantized
    threshold: float | None = None  # LLM.int8()'s
    turned: Mapping[str, int] = field(default_factory=dict)  # modules whose rows are, in blocks of so many numbers

    def describe(self, count: int) -> str:
        """For people, as in "LLM_INT8 x 210 (bitsandbytes, threshold 6)"."""
        threshold = "" if self.threshold is None else f", threshold {self.threshold:g}"
        if self.threshold == math.inf:
            threshold = ", no threshold"
        dtype = _TURNED.dtype if self.turned else self.layout.dtype
        return f"{dtype} x {count} ({self.layout.method}{threshold})"


def parse(raw: object, path: Path) -> Quantization | None:
    """None where nothing is quantized. Raises BadFile for what is broken, Unsupported for what pronk has not."""
    if raw is None or raw == {}:
        return None
    keys = _Keys(raw, path, "quantization_config")
    method = keys.take("quant_method", None)
    if method == "compressed-tensors":
        return _compressed_tensors(keys)
    in_8_bits = isinstance(raw, dict) and raw.get("load_in_8bit") is True
    if method == "bitsandbytes" or (method is None and in_8_bits):  # transformers once left the method out
        return _bitsandbytes(keys)
    raise Unsupported(f"{path}: quantization_config ({short(method)}) is not supported; {WAY_OUT}")


def gather(found: Quantization, path: Path, tensors: Mapping[str, LazyTensor]) -> tuple[dict[str, LazyTensor], str]:
    """Codes and scales joined into tensors of its type, all others as they are; and what was found, in words.
    Raises BadFile where the two do not belong together."""
    layout, gathered, companions, count = found.layout, dict(tensors), dict[str, LazyTensor](), 0
    for name in tensors:
        module, _, kind = name.rpartition(".")
        if kind in (layout.scale, layout.companion):
            if getattr(tensors.get(f"{module}.weight"), "dtype", None) != "I8":
                raise BadFile(path, f"has no int8 matrix {module}.weight to go with", field=f"tensor {short(name)}")
            companions[name] = gathered.pop(name)
    for name, codes in tensors.items():
        module, _, kind = name.rpartition(".")
        if codes.dtype != "I8" or kind != "weight":
            continue
        scale = companions.get(f"{module}.{layout.scale}")
        if scale is None:
            raise BadFile(path, f"is int8 and has no {module}.{layout.scale}", field=f"tensor {short(name)}")
        if module in found.left_out:
            raise BadFile(path, "is int8, though quantization_config leaves it out", field=f"tensor {short(name)}")
        if module == "model.embed_tokens":
            raise Unsupported(f"{path}: embeddings in int8 are not supported; {WAY_OUT}")
        made = _TURNED if _is_turned(found, path, module, codes) else layout
        gathered[name] = _join(made, path, codes, scale, companions.get(f"{module}.{layout.companion}"))
        count += 1
    for module in found.turned:
        if getattr(tensors.get(f"{module}.weight"), "dtype", None) != "I8":
            problem = f"names {short(module)}, which is no int8 matrix here"
            raise BadFile(path, problem, field="quantization_config transform_config")
    if not count:
        problem = f"says {layout.method}, and no tensor is int8; delete the key"
        raise BadFile(path, problem, field="quantization_config")
    return gathered, found.describe(count)


def _is_turned(found: Quantization, path: Path, module: str, codes: LazyTensor) -> bool:
    """Raises Unsupported for other blocks than pronk turns rows in."""
    block = found.turned.get(module)
    if block is not None and len(codes.shape) == 2 and block != (own := together(codes.shape[1])):
        raise Unsupported(
            f"{path}: transform_config turns what {short(module)} reads in blocks of {block}, which is not supported; "
            f"of rows of {codes.shape[1]} blocks of {own} are; {WAY_OUT}"
        )
    return block is not None


def _join(layout: Layout, path: Path, codes: LazyTensor, scale: LazyTensor, zeros: LazyTensor | None) -> LazyTensor:
    rows = codes.shape[0] if len(codes.shape) == 2 else 0
    shapes = [(rows,), (rows, 1)] if layout.column else [(rows,)]
    if not rows or scale.shape not in shapes or scale.dtype not in layout.scale_dtypes:
        problem = f"{scale.dtype} {scale.shape} is no scale for each row of int8 {codes.shape}"
        raise BadFile(path, problem, field=f"tensor {short(scale.name)}")
    if zeros and (zeros.dtype not in ("I8", "U8") or math.prod(zeros.shape) > rows):
        raise BadFile(path, f"{zeros.dtype} {zeros.shape} is not understood", field=f"tensor {short(zeros.name)}")
    return int8_rows.lazy(layout, path, codes, scale, zeros)


class _Keys:
    """An object of the config, from which keys are taken; what is left at the end must be off."""

    def __init__(self, raw: object, path: Path, field: str) -> None:
        self.path, self.field = path, field
        if not isinstance(raw, dict):
            raise BadFile(path, f"must be an object, not {short(raw)}", field=field)
        self.raw: dict[str, Any] = {key: value for key, value in raw.items() if value is not None}

    def take(self, key: str, default: Any) -> Any:
        return self.raw.pop(key, default)

    def of_type(self, key: str, kind: type, default: Any) -> Any:
        value = self.take(key, default)
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise BadFile(self.path, f"must be {_NAMES[kind]}, not {short(value)}", field=f"{self.field} {key}")
        return value

    def names(self, key: str) -> frozenset[str]:
        values = self.of_type(key, list, [])
        if not all(isinstance(value, str) for value in values):
            raise BadFile(self.path, f"must be names, not {short(values)}", field=f"{self.field} {key}")
        return frozenset(values)

    def must_be(self, key: str, *allowed: object) -> None:
        """The first of `allowed` is the default."""
        value = self.take(key, allowed[0])
        if not any(type(value) is type(other) and value == other for other in allowed):
            self.refuse(key, value, f"only {' or '.join(map(repr, allowed))} is; {WAY_OUT}")

    def refuse(self, key: str, value: object, rest: str) -> NoReturn:
        raise Unsupported(f"{self.path}: {self.field} {key}={short(value)} is not supported; {rest}")

    def finish(self, ignored: frozenset[str]) -> None:
        for key, value in self.raw.items():
            if key not in ignored and value not in (False, {}, []):
                self.refuse(short(key), value, f"it may change the mathematics; {WAY_OUT}")


_NAMES = {bool: "true or false", dict: "an object", list: "a list", float: "a number"}


def _bitsandbytes(keys: _Keys) -> Quantization:
    flags = {key: keys.of_type(key, bool, False) for key in ("load_in_8bit", "load_in_4bit")}
    for key, value in flags.items():
        if keys.of_type(f"_{key}", bool, value) is not value:
            raise BadFile(keys.path, f"contradicts _{key}", field=f"{keys.field} {key}")
    if flags["load_in_4bit"] or not flags["load_in_8bit"]:
        raise Unsupported(
            f"{keys.path}: quantization_config: bitsandbytes in other than 8 bits (load_in_4bit: FP4 and NF4) is not "
            f"supported; {WAY_OUT}; --quantize q4 makes 4 bits of either"
        )
    if keys.of_type("llm_int8_has_fp16_weight", bool, False):
        keys.refuse("llm_int8_has_fp16_weight", True, "delete quantization_config, and load with --quantize llm-int8")
    threshold = keys.take("llm_int8_threshold", INT8_THRESHOLD)
    if type(threshold) not in (int, float) or not 0 <= threshold < math.inf:
        problem = f"must be a number, 0 or more, not {short(threshold)}"
        raise BadFile(keys.path, problem, field=f"{keys.field} llm_int8_threshold")
    left_out = keys.names("llm_int8_skip_modules")
    keys.of_type("llm_int8_enable_fp32_cpu_offload", bool, False)
    keys.finish(frozenset(key for key in keys.raw if key.startswith("bnb_4bit_")))
    # To bitsandbytes 0 means that nothing is computed apart; here that is a threshold nothing passes.
    return Quantization(LAYOUTS["LLM_INT8"], left_out, float(threshold) or math.inf)


def _compressed_tensors(keys: _Keys) -> Quantization:
    keys.must_be("format", "int-quantized", "naive-quantized")
    keys.must_be("quantization_status", "compressed", "frozen")
    sparsity = keys.of_type("sparsity_config", dict, {})
    if sparsity.get("format", "dense") != "dense":
        keys.refuse("sparsity_config", sparsity, WAY_OUT)
    if (kv := keys.take("kv_cache_scheme", None)) is not None:
        keys.refuse("kv_cache_scheme", kv, "delete the key; --kv-dtype int8 quantizes keys and values as they come")
    left_out = frozenset(name for name in keys.names("ignore") if not name.startswith("re:"))
    groups = keys.of_type("config_groups", dict, {})
    if not groups:
        raise BadFile(keys.path, "required and absent, or empty", field=f"{keys.field} config_groups")
    for name, group in groups.items():
        _check_group(name, group, keys.path)
    turned = _transforms(keys.of_type("transform_config", dict, {}), keys.path)
    keys.finish(_HISTORY)
    return Quantization(LAYOUTS["INT8"], left_out, turned=turned)


def _transforms(raw: dict[str, Any], path: Path) -> dict[str, int]:
    """The modules whose activations and weights are turned by the same Hadamard matrices, and the sizes of these."""
    keys, turned = _Keys(raw, path, "transform_config"), dict[str, int]()
    for name, group in keys.of_type("config_groups", dict, {}).items():
        scheme = _Keys(group, path, f"transform_config {short(name)}")
        scheme.must_be("type", "hadamard")
        scheme.must_be("randomize", False)
        scheme.must_be("precision", "torch.float32", "float32")
        scheme.take("requires_grad", False)
        block, applied = scheme.take("head_dim", None), dict[str, frozenset[str]]()
        if type(block) is not int or block < 1:
            scheme.refuse("head_dim", block, f"only whole numbers of columns are; {WAY_OUT}")
        for part in scheme.of_type("apply", list, []):
            args = _Keys(part, path, f"transform_config {short(name)} apply")
            location, targets = args.take("location", None), args.names("targets")
            if location not in ("input", "weight_input") or location in applied:
                args.refuse("location", location, f"only an 'input' and its 'weight_input' are; {WAY_OUT}")
            if pattern := next((target for target in sorted(targets) if "." not in target or ":" in target), None):
                args.refuse("targets", pattern, f"only modules by their names are; {WAY_OUT}")
            args.take("inverse", False)  # a Hadamard matrix is its own
            args.finish(frozenset())
            applied[location] = targets
        if len(set(applied.values())) != 1 or len(applied) != 2:
            problem = "must turn the 'input' and the 'weight_input' of the same modules"
            raise BadFile(path, problem, field=f"transform_config {short(name)}")
        scheme.finish(frozenset())
        for module in applied["input"]:
            if module in turned:
                raise BadFile(path, f"turns {short(module)} twice", field="transform_config")
            turned[module] = block
    keys.finish(frozenset())
    return turned


def _check_group(name: str, raw: object, path: Path) -> None:
    """Raise unless it is W8A8: int8 weights with a scale a row, int8 activations with a scale a token."""
    if isinstance(raw, list):  # a preset's name, and what it is for
        if name not in _PRESETS:
            raise Unsupported(f"{path}: config_groups {short(name)} is not supported; {WAY_OUT}")
        return
    field = f"config_groups {short(name)}"
    keys = _Keys(raw, path, field)
    keys.names("targets")
    keys.must_be("format", "int-quantized", "naive-quantized")
    for part, strategy, dynamic in (("weights", "channel", False), ("input_activations", "token", True)):
        if part not in keys.raw:
            keys.refuse(part, None, f"pronk computes with int8 weights and int8 activations; {WAY_OUT}")
        args = _Keys(keys.take(part, None), path, f"{field} {part}")
        for key, value in {"num_bits": 8, "type": "int", "symmetric": True}.items():
            args.must_be(key, value)
        if (found := args.take("strategy", "channel" if args.raw.get("group_size") == -1 else "tensor")) != strategy:
            args.refuse("strategy", found, f"only {strategy!r} is; {WAY_OUT}")
        if (found := args.take("dynamic", False)) is not dynamic:
            args.refuse("dynamic", found, f"only {dynamic} is; {WAY_OUT}")
        args.must_be("group_size", -1)
        args.must_be("actorder", False, "weight", "static")  # in which order weights were rounded
        args.finish(_ARGS_HISTORY)
    keys.finish(frozenset())
