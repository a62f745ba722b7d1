"""GGUF, the format of llama.cpp: one file, or several named like `model-00001-of-00003.gguf`, to a Checkpoint.

gguf_file.py reads the container and gguf_blocks.py decodes block types; here metadata becomes a ModelConfig and tensors
get their Hugging Face names and half-split rows.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pronk.checkpoint.budget import Budget
from pronk.checkpoint.containers import gguf_blocks
from pronk.checkpoint.containers.gguf_file import MAGIC, GgufFile, TensorInfo, open_file
from pronk.checkpoint.containers.mapped import first_bytes
from pronk.checkpoint.readers.names import gguf_to_hf, rotary_heads, to_half_split
from pronk.checkpoint.tensors import PLAIN_DTYPES, Checkpoint, LazyTensor, check_tensors
from pronk.config import ModelConfig
from pronk.config.rope import by_name
from pronk.config.rope_scaling import RopeScaling
from pronk.errors import BadFile, Unsupported
from pronk.tokenizer.vocabulary import TokenizerSource, gguf_token_id

ROPE_FREQS = "rope_freqs.weight"

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)

# llama.* keys that do not reach the logits of one forward pass.
_IGNORED = frozenset(("tensor_data_layout", "rope.scaling.finetuned"))


def detect(path: Path) -> bool:
    """Whether this is a file that begins as GGUF files do."""
    return first_bytes(path, 4) == MAGIC


def read(path: Path) -> Checkpoint:
    """A GGUF file; of several parts, any one. Raises BadFile, or Unsupported for maths or types pronk does not have."""
    parts = _open_parts(path)
    first = parts[0]
    described = {info.name: (part, info) for part in parts for info in part.tensors.values()}
    config = _config(first, described)
    tensors: dict[str, LazyTensor] = {}
    for name, (part, info) in described.items():
        if name != ROPE_FREQS:
            tensor = _lazy(part, info, config)
            tensors[tensor.name] = tensor
    check_tensors(first.path, config, tensors)
    counts = Counter(t.dtype for t in tensors.values() if t.dtype not in PLAIN_DTYPES or len(t.shape) == 2)
    types = ", ".join(f"{dtype} x {count}" for dtype, count in counts.most_common())
    quantization = types if counts.keys() - PLAIN_DTYPES.keys() else None
    files = tuple(part.path for part in parts)
    return Checkpoint(path, "gguf", config, tensors, _tokenizer(first), quantization, files=files)


def _open_parts(path: Path) -> list[GgufFile]:
    """All parts of a split file, in order; or the one file."""
    budget = Budget()
    opened = open_file(path, budget)
    count = opened.metadata.get("split.count", 1)
    if count in (0, 1):
        return [opened]
    named = _PART.fullmatch(path.name)
    if type(count) is not int or not named or int(named[3]) != count:
        raise _bad(opened, "split.count", f"says {count!r:.20}, but the name is not like model-00001-of-00003.gguf")
    parts = []
    for number in range(count):
        part_path = path.with_name(f"{named[1]}-{number + 1:05d}-of-{named[3]}.gguf")
        if not part_path.is_file():
            raise BadFile(path, f"part {part_path.name} is absent", field="split")
        part = opened if part_path == path else open_file(part_path, budget)
        for key, expected in (("split.no", number), ("split.count", count)):
            if part.metadata.get(key) != expected:
                raise _bad(part, key, f"is {part.metadata.get(key)!r:.20}, but the name calls for {expected}")
        parts.append(part)
    first, seen = parts[0], set[str]()
    for part in parts:
        for key in part.metadata.keys() - {"split.no"}:
            if key not in first.metadata or part.metadata[key] != first.metadata[key]:
                raise _bad(part, key, f"differs from that of {first.path.name}")
        if twice := seen & part.tensors.keys():
            raise BadFile(part.path, "stands in an earlier part too", field=f"tensor {min(twice)!r}")
        seen |= part.tensors.keys()
    total = first.metadata.get("split.tensors.count", len(seen))
    if total != len(seen):
        raise _bad(first, "split.tensors.count", f"is {total!r:.20}, but the parts hold {len(seen)} tensors")
    return parts


def _bad(file: GgufFile, key: str, problem: str) -> BadFile:
    return BadFile(file.path, problem, field=f"metadata {key!r:.80}", offset=file.offsets.get(key))


def _config(file: GgufFile, described: Mapping[str, tuple[GgufFile, TensorInfo]]) -> ModelConfig:
    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise _bad(file, "general.architecture", "absent, or no string")
    if architecture != "llama":
        raise Unsupported(f"{file.path}: architecture {architecture!r:.40} is not supported; 'llama' is")
    if (kind := metadata.get("general.type", "model")) == "adapter":
        raise Unsupported(
            f"{file.path}: an adapter, no model by itself; --adapter {file.path} puts it beside its model"
        )
    if kind != "model":
        raise Unsupported(f"{file.path}: holds a {kind!r:.40}, not a 'model'")
    llama = {key[6:]: value for key, value in metadata.items() if key.startswith("llama.")}

    def integer(key: str, default: int | None = None) -> int:
        value = llama.pop(key, default)
        if isinstance(value, list) and value:  # one value a layer
            if any(other != value[0] for other in value):
                raise Unsupported(f"{file.path}: llama.{key} that differs from layer to layer is not supported")
            value = value[0]
        if type(value) is not int:
            problem = "required and absent" if value is None else f"must be a whole number, not {value!r:.40}"
            raise _bad(file, f"llama.{key}", problem)
        return value

    def number(key: str, default: float | None = None) -> float:
        value = llama.pop(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            problem = "required and absent" if value is None else f"must be a finite number, not {value!r:.40}"
            raise _bad(file, f"llama.{key}", problem)
        return float(value)

    heads, hidden = integer("attention.head_count"), integer("embedding_length")
    if heads < 1:
        raise _bad(file, "llama.attention.head_count", f"must be positive, not {heads}")
    head_dim = integer("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (value := integer(key, head_dim)) != head_dim:
            raise Unsupported(f"{file.path}: llama.{key} {value} other than the key length {head_dim} is not supported")
    tokens = metadata.get("tokenizer.ggml.tokens")
    vocab_size = integer("vocab_size", len(tokens) if isinstance(tokens, list) else None)
    try:
        config = ModelConfig(
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=integer("feed_forward_length"),
            num_hidden_layers=integer("block_count"),
            num_attention_heads=heads,
            num_key_value_heads=integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            max_position_embeddings=integer("context_length"),
            rms_norm_eps=_shortest(number("attention.layer_norm_rms_epsilon")),
            rope_theta=_shortest(number("rope.freq_base", 10000.0)),
            rope_scaling=_rope_scaling(file, llama, number, described.get(ROPE_FREQS), head_dim),
            attention_bias="blk.0.attn_q.bias" in described,
            mlp_bias="blk.0.ffn_gate.bias" in described,
            tie_word_embeddings="output.weight" not in described,
            bos_token_id=_token(file, "bos", vocab_size),
            eos_token_ids=_ends(file, vocab_size),
            pad_token_id=_token(file, "padding", vocab_size),
        )
    except ValueError as error:
        raise BadFile(file.path, str(error), field="metadata") from None
    for key, value in llama.items():
        if key not in _IGNORED and value not in (0, False):  # zero is how llama.cpp writes "off"
            name = f"llama.{key}"
            raise Unsupported(
                f"{file.path}: {name!r:.80} ({value!r:.40}) may change the mathematics and is not supported"
            )
    return by_name(config)


def _rope_scaling(
    file: GgufFile, llama: dict[str, Any], number: Any, factors: tuple[GgufFile, TensorInfo] | None, head_dim: int
) -> RopeScaling | None:
    """Take the rope.scaling keys out of `llama`; as llama.cpp does, read a factor without a type as linear scaling."""
    kind = llama.pop("rope.scaling.type", "linear")
    factor = _shortest(number("rope.scaling.factor", 0.0) or number("rope.scale_linear", 0.0) or 1.0)
    number("rope.scaling.original_context_length", 0)
    if (attention := number("rope.scaling.attn_factor", 1.0)) != 1.0:
        raise Unsupported(f"{file.path}: llama.rope.scaling.attn_factor={attention} is not supported")
    if kind not in ("none", "linear"):
        raise Unsupported(f"{file.path}: llama.rope.scaling.type={kind!r:.40} is not supported; 'linear' is")
    if kind == "none":
        factor = 1.0
    if factors is not None:
        part, info = factors
        if info.dtype != "F32" or info.shape != (head_dim // 2,):
            problem = f"must be F32 of shape ({head_dim // 2},), not {info.dtype} of shape {info.shape}"
            raise BadFile(part.path, problem, field=f"tensor {ROPE_FREQS!r}", offset=info.described_at)
        values = part.numbers(info) * np.float32(factor)
        return RopeScaling("factors", factors=tuple(values.tolist()))
    return RopeScaling("linear", factor=factor) if factor != 1.0 else None


def _shortest(value: float) -> float:
    """The shortest decimal of the same float32, as the model's author wrote it: 1e-05, not 9.99999974e-06."""
    with np.errstate(over="ignore"):
        return float(str(np.float32(value)))


def _token(file: GgufFile, name: str, vocab_size: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    try:
        token = gguf_token_id(file.metadata, name)
    except ValueError as error:
        raise _bad(file, key, str(error)) from None
    if token is not None and not 0 <= token < vocab_size:
        raise _bad(file, key, f"{token} is no token of a vocabulary of {vocab_size}")
    return token


def _ends(file: GgufFile, vocab_size: int) -> tuple[int, ...]:
    """End of text, of turn and of message: after any of them there is nothing more to say."""
    found = [_token(file, name, vocab_size) for name in ("eos", "eot", "eom")]
    return tuple(dict.fromkeys(token for token in found if token is not None))


def _tokenizer(file: GgufFile) -> TokenizerSource | None:
    settings = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
    if not isinstance(settings.get("tokenizer.ggml.tokens"), list):
        return None
    template = settings.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise _bad(file, "tokenizer.chat_template", "must be a string")
    return TokenizerSource("gguf", file.path, settings, template)


def _lazy(file: GgufFile, info: TensorInfo, config: ModelConfig) -> LazyTensor:
    name = gguf_to_hf(info.name)
    if name is None:
        raise Unsupported(f"{file.path}: tensor {info.name!r} is not part of a LLaMA model that pronk knows")
    heads = rotary_heads(name, config)

    def half_split(array: NDArray[Any]) -> NDArray[Any]:
        return array if heads is None else to_half_split(array, heads)

    if info.dtype in PLAIN_DTYPES:
        return LazyTensor(name, info.shape, info.dtype, info.nbytes, lambda: half_split(file.numbers(info)))
    if info.dtype not in gguf_blocks.BLOCK_TYPES or len(info.shape) != 2:
        raise Unsupported(f"{file.path}: tensor {info.name!r} of type {info.dtype} {info.shape} is not supported")

    def read_blocks() -> NDArray[np.uint8]:
        return half_split(file.blocks(info))

    def read() -> NDArray[np.float32]:
        return gguf_blocks.decode(info.dtype, read_blocks())

    return LazyTensor(name, info.shape, info.dtype, info.nbytes, read, read_blocks)
