"""llama2.c's .bin files, versions 0, 1 and 2: a header of integers, then tensors in a fixed order, without names.

Version 0 has no magic and holds tables of rotary angles that its readers skip. Version 1 has a header of 256 bytes.
Version 2 keeps norms in float32 and all else as int8, with one float32 scale a group of the flattened tensor. The
format has no place for a RoPE base or an epsilon of its own: they are 10000 and 1e-5.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pronk.checkpoint.containers.mapped import MappedFile, first_bytes
from pronk.checkpoint.readers.names import rotary_heads, to_half_split
from pronk.checkpoint.tensors import EMBEDDING, HEAD, Checkpoint, LazyTensor
from pronk.config import ModelConfig
from pronk.errors import BadFile, Unsupported
from pronk.tokenizer import files as tokenizer_files
from pronk.tokenizer.vocabulary import TokenizerSource

MAGIC = 0x616B3432
HEADER_BYTES = {0: 28, 1: 256, 2: 256}
RMS_NORM_EPS = 1e-5
ROPE_THETA = 10000.0
BEGIN_TOKEN, END_TOKENS = 1, (2, 1)  # run.c stops at BOS, which parts one text from the next

_FIELDS = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "seq_len")
_PROBED = 20 << 20  # bytes of files beside the model, read to see whether they are its tokenizer


@dataclass(frozen=True)
class Header:
    version: int
    config: ModelConfig
    group_size: int = 1  # version 2


@dataclass(frozen=True)
class Slot:
    """Where one tensor stands. `name` is Hugging Face's; None for the tables that are skipped."""

    name: str | None
    shape: tuple[int, ...]
    start: int  # byte of the file
    nbytes: int
    quantized: bool


def detect(path: Path) -> bool:
    """Whether this is a llama2.c model: by its magic or, in version 0, by a header whose sizes add up to the file's."""
    head = first_bytes(path, 256)
    if head[:4] == struct.pack("<I", MAGIC):
        return True
    size = _called_for(path, head)
    return size is not None and size == path.stat().st_size


def cut_short(path: Path) -> str | None:
    """What a file of version 0 lacks, if what it begins with is a header of one."""
    size = _called_for(path, first_bytes(path, 256))
    if size is None or size <= path.stat().st_size:
        return None
    return f"is cut short, if it is llama2.c's: its header calls for {size} bytes, but it has {path.stat().st_size}"


def _called_for(path: Path, head: bytes) -> int | None:
    """The size that the header has the whole file be; None where it is none."""
    try:
        return slots(_parse_header(path, head))[1]
    except BadFile:
        return None


def read(path: Path) -> Checkpoint:
    """Raises BadFile, or Unsupported for a version that llama2.c does not have."""
    file = MappedFile(path)
    header = _parse_header(path, file.bytes(0, 256))
    placed, size = slots(header)
    if size != file.size:
        problem = f"the header calls for {size} bytes, but the file has {file.size}"
        raise BadFile(path, problem, field="size", offset=min(size, file.size))
    tokenizer = _tokenizer_beside(path, header.config.vocab_size)
    config = header.config
    if not _begins_with_s(tokenizer):
        config = replace(config, bos_token_id=None, eos_token_ids=())
    tensors = {}
    for slot in placed:
        if slot.name is not None:
            tensors[slot.name] = _lazy(file, slot, slot.name, header)
    count = sum(slot.quantized for slot in placed)
    return Checkpoint(path, "llama2c", config, tensors, tokenizer, f"I8 x {count}" if count else None, files=(path,))


def slots(header: Header) -> tuple[list[Slot], int]:
    """Every tensor in the order of the file, and the size of the whole file."""
    config, version = header.config, header.version
    shapes = config.tensor_shapes()
    placed, end = [], HEADER_BYTES[version]
    for name in _order(config, version):
        # The two tables of version 0 are [seq_len, D / 2] each.
        shape = (2, config.max_position_embeddings, config.head_dim // 2) if name is None else shapes[name]
        count = math.prod(shape)
        quantized = version == 2 and len(shape) == 2
        nbytes = count + count // header.group_size * 4 if quantized else count * 4
        placed.append(Slot(name, shape, end, nbytes, quantized))
        end += nbytes
    return placed, end


def _order(config: ModelConfig, version: int) -> Iterator[str | None]:
    def layers(*parts: str) -> Iterator[str]:
        for part in parts:
            for layer in range(config.num_hidden_layers):
                yield f"model.layers.{layer}.{part}.weight"

    attention = [f"self_attn.{p}_proj" for p in "qkvo"]
    mlp = ("mlp.gate_proj", "mlp.down_proj", "mlp.up_proj")
    if version == 0:
        yield EMBEDDING
        yield from layers("input_layernorm", *attention, "post_attention_layernorm", *mlp)
        yield "model.norm.weight"
        yield None
    else:
        yield from layers("input_layernorm", "post_attention_layernorm")
        yield "model.norm.weight"
        yield EMBEDDING
        yield from layers(*attention, *mlp)
    if not config.tie_word_embeddings:
        yield HEAD


def _parse_header(path: Path, head: bytes) -> Header:
    version, at = 0, 0
    if head[:4] == struct.pack("<I", MAGIC):
        if len(head) < HEADER_BYTES[1]:
            raise BadFile(path, "truncated", field="header", offset=len(head))
        version, at = struct.unpack_from("<i", head, 4)[0], 8
        if version not in (1, 2):
            raise Unsupported(f"{path}: llama2.c version {version} is not supported; 0, 1 and 2 are")
    if len(head) < HEADER_BYTES[version]:
        raise BadFile(path, "truncated", field="header", offset=len(head))
    values = dict(zip(_FIELDS, struct.unpack_from("<7i", head, at), strict=True))
    tied = values["vocab_size"] > 0
    if version == 0:
        values["vocab_size"] = abs(values["vocab_size"])  # the sign is its only place for "untied"
    else:
        if head[36] > 1:
            raise BadFile(path, f"{head[36]} is neither 0 nor 1", field="shared_classifier", offset=36)
        tied = head[36] == 1
    for index, (field, value) in enumerate(values.items()):
        if value < 1:
            raise BadFile(path, f"must be positive, not {value}", field=field, offset=at + 4 * index)
    if values["dim"] % values["n_heads"]:
        problem = f"{values['n_heads']} does not divide dim, {values['dim']}"
        raise BadFile(path, problem, field="n_heads", offset=at + 12)
    try:
        config = ModelConfig(
            vocab_size=values["vocab_size"],
            hidden_size=values["dim"],
            intermediate_size=values["hidden_dim"],
            num_hidden_layers=values["n_layers"],
            num_attention_heads=values["n_heads"],
            num_key_value_heads=values["n_kv_heads"],
            head_dim=values["dim"] // values["n_heads"],
            max_position_embeddings=values["seq_len"],
            rms_norm_eps=RMS_NORM_EPS,
            rope_theta=ROPE_THETA,
            tie_word_embeddings=tied,
            bos_token_id=BEGIN_TOKEN,
            eos_token_ids=END_TOKENS,
        )
    except ValueError as error:
        raise BadFile(path, str(error), field="header", offset=at) from None
    if version < 2:
        return Header(version, config)
    group_size = struct.unpack_from("<i", head, 37)[0]
    check_group_size(path, config, group_size)
    return Header(version, config, group_size)


def check_group_size(path: Path, config: ModelConfig, group_size: int) -> None:
    """Groups run over the ends of rows, but not over those of tensors. Raises BadFile."""
    sizes = {math.prod(shape) for shape in config.tensor_shapes().values() if len(shape) == 2}
    if group_size < 1 or any(size % group_size for size in sizes):
        raise BadFile(path, f"groups of {group_size} do not divide every tensor", field="group_size", offset=37)


def _lazy(file: MappedFile, slot: Slot, name: str, header: Header) -> LazyTensor:
    heads = rotary_heads(name, header.config)
    count = math.prod(slot.shape)

    def read() -> NDArray[Any]:
        if not slot.quantized:
            array = file.array(slot.start, slot.shape, np.dtype(np.float32))
        else:
            quants = file.array(slot.start, (count // header.group_size, header.group_size), np.dtype(np.int8))
            scales = file.array(slot.start + count, (count // header.group_size, 1), np.dtype(np.float32))
            with np.errstate(all="ignore"):  # an infinite or NaN scale is the file's own, and is passed on
                array = np.multiply(quants.astype(np.float32), scales).reshape(slot.shape)
        return array if heads is None else to_half_split(array, heads)

    return LazyTensor(name, slot.shape, "I8" if slot.quantized else "F32", slot.nbytes, read)


def _tokenizer_beside(path: Path, vocab_size: int) -> TokenizerSource | None:
    """The first file of the folder, those called `tokenizer` before the rest, that defines exactly `vocab_size` ids."""
    candidates = [
        file
        for file in path.parent.iterdir()
        if "tok" in file.name.lower() and file.suffix in (".bin", ".model", ".json") and file != path
    ]
    left = _PROBED
    for file in sorted(candidates, key=lambda file: (not file.name.startswith("tokenizer"), file.name)):
        try:
            size = file.stat().st_size
            # Formats take 4 to some 130 bytes a token, more for few.
            if not 2 * vocab_size <= size <= min(left, 300 * vocab_size + (1 << 18)):
                continue
            left -= size
            kind = tokenizer_files.identify(file)
            if kind and tokenizer_files.vocabulary_size(file) == vocab_size:
                return TokenizerSource(kind, file)
        except (BadFile, OSError):
            continue  # a file that happens to lie here; it was never asked for
    return None


def _begins_with_s(tokenizer: TokenizerSource | None) -> bool:
    """Whether <s> is 1 and </s> is 2, as in every SentencePiece vocabulary; llama2.c itself knows nothing else."""
    if tokenizer is None or tokenizer.kind == "sentencepiece":
        return True
    if tokenizer.kind != "llama2c":
        return False
    records = tokenizer_files.llama2c_records(tokenizer.path, tokenizer_files.read_whole(tokenizer.path))
    return [token.strip() for _, (_, token) in zip(range(3), records, strict=False)][1:] == [b"<s>", b"</s>"]
