"""Meta's own checkpoints: params.json and consolidated.NN.pth, one file for each model-parallel rank, joined as read.

Each rank holds a slice of every linear layer: wq, wk, wv, w1, w3 and output were split on rows, wo and w2 on columns.
Token embeddings were split on columns in Llama 1 and 2, on rows in Llama 3; since `dim` is known, shapes tell which.
Norms are whole in every rank, and rank 0's are used. Pieces stay on disk until a tensor is read; then the whole tensor
is allocated once and every piece copied to its place, so that loading takes the model and one tensor.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pronk import strict_json
from pronk.checkpoint.budget import Budget
from pronk.checkpoint.containers import weight_file
from pronk.checkpoint.readers.names import meta_to_hf, rotary_heads, to_half_split
from pronk.checkpoint.tensors import EMBEDDING, HEAD, Checkpoint, LazyTensor, check_tensors, plain_dtype
from pronk.config import ModelConfig
from pronk.config.rope_scaling import RopeScaling
from pronk.errors import BadFile, Unsupported, short
from pronk.tokenizer import files as tokenizer_files
from pronk.tokenizer import source as tokenizer_source
from pronk.tokenizer.vocabulary import TokenizerSource

_SHARD = re.compile(r"consolidated\.([0-9]{2})\.pth")
_GATE = "model.layers.0.mlp.gate_proj.weight"
_SPLIT_ON_COLUMNS = (".self_attn.o_proj.weight", ".mlp.down_proj.weight")

# Settings of Meta's programs rather than of the model.
_IGNORED = frozenset(("max_batch_size", "model_parallel_size"))


def detect(path: Path) -> bool:
    """A folder with params.json and consolidated.NN.pth, or one of those files."""
    if path.is_dir():
        return (path / "params.json").is_file() and bool(_numbered(path))
    named = _SHARD.fullmatch(path.name) and (path.parent / "params.json").is_file()
    return bool(named) and weight_file.detect(path)


def read(path: Path) -> Checkpoint:
    """A folder, or any one of its shards. Raises BadFile, or Unsupported for maths pronk lacks."""
    folder = path if path.is_dir() else path.parent
    files = _shards(folder)
    budget = Budget()
    ranks = [_rank(file, budget) for file in files]
    for file, rank in zip(files, ranks, strict=True):
        if odd := rank.keys() ^ ranks[0].keys():
            raise BadFile(file, f"is in this shard or in {files[0].name}, not in both", field=f"tensor {min(odd)!r}")
    pieces = {name: [rank[name] for rank in ranks] for name in ranks[0]}
    params_path = folder / "params.json"
    config = _config(params_path, strict_json.read(params_path), pieces)
    tensors = {name: _join(files, name, pieces[name], config) for name in pieces}
    check_tensors(path, config, tensors)
    return Checkpoint(path, "meta", config, tensors, _tokenizer(folder), files=tuple(files))


def _numbered(folder: Path) -> dict[int, Path]:
    found = {_SHARD.fullmatch(file.name): file for file in folder.iterdir() if file.is_file()}
    return {int(match[1]): file for match, file in found.items() if match}


def _shards(folder: Path) -> list[Path]:
    numbered = _numbered(folder)
    if not numbered:
        raise BadFile(folder, "holds a params.json and no consolidated.00.pth")
    for number in range(max(numbered)):
        if number not in numbered:
            raise BadFile(folder, f"shard consolidated.{number:02d}.pth is absent")
    return [numbered[number] for number in sorted(numbered)]


def _rank(file: Path, budget: Budget) -> dict[str, LazyTensor]:
    """One shard's tensors by Hugging Face's names."""
    tensors = {}
    for name, tensor in weight_file.read(file, budget).items():
        if name.endswith("rope.freqs"):  # Llama 1 and 2 saved them; they follow from params.json
            continue
        renamed = meta_to_hf(name)
        if renamed is None:
            raise Unsupported(f"{file}: tensor {short(name)} is not part of a LLaMA model that pronk knows")
        tensors[renamed] = tensor
    return tensors


# params.json


@dataclass(frozen=True)
class _Params:
    """What params.json says, with the defaults of Meta's programs. Any key beyond is refused by name."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int | None = None
    vocab_size: int = -1
    multiple_of: int | None = None
    ffn_dim_multiplier: float | None = None
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    use_scaled_rope: bool = False
    rope_scaling_factor: float | None = None
    rope_high_freq_factor: float | None = None
    max_seq_len: int | None = None


_WHOLE = ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "max_seq_len")


def _params(path: Path, raw: dict[str, Any]) -> _Params:
    known = {key: value for key, value in raw.items() if key not in _IGNORED and value is not None}
    for key, value in known.items():
        if key not in _Params.__dataclass_fields__:
            raise Unsupported(f"{path}: {short(key)}={short(value)} may change the mathematics and is not supported")
        kinds = (int,) if key in _WHOLE else (bool,) if key == "use_scaled_rope" else (int, float)
        if type(value) not in kinds or (key not in ("use_scaled_rope", "vocab_size") and not 0 < value < 1 << 40):
            wanted = "true or false" if bool in kinds else "a positive number" if float in kinds else "a whole number"
            raise BadFile(path, f"must be {wanted}, not {short(value)}", field=key)
    for key in ("dim", "n_layers", "n_heads"):
        if key not in known:
            raise BadFile(path, "required and absent", field=key)
    return _Params(**known)


def _config(path: Path, raw: dict[str, Any], pieces: dict[str, list[LazyTensor]]) -> ModelConfig:
    params = _params(path, raw)
    if params.dim % params.n_heads:
        raise BadFile(path, f"dim ({params.dim}) is no multiple of n_heads ({params.n_heads})")
    embedding, gate = pieces.get(EMBEDDING), pieces.get(_GATE)
    if not embedding or not gate or len(embedding[0].shape) != 2 or len(gate[0].shape) != 2:
        raise BadFile(path.parent, "the shards have no token embeddings, or no feed-forward layer")
    rows = embedding[0].shape[0]
    vocab_size = rows if _split_axis(EMBEDDING, embedding, params.dim) == 1 else rows * len(embedding)
    if params.vocab_size not in (-1, vocab_size):
        problem = f"{params.vocab_size}, but the shards hold embeddings of {vocab_size} tokens"
        raise BadFile(path, problem, field="vocab_size")
    hidden = gate[0].shape[0] * len(gate)
    if params.multiple_of and hidden != (called_for := _feed_forward_size(params)):
        raise BadFile(path, f"calls for feed-forward layers of {called_for}, and the shards' are of {hidden}")
    try:
        return ModelConfig(
            vocab_size=vocab_size,
            hidden_size=params.dim,
            intermediate_size=hidden,
            num_hidden_layers=params.n_layers,
            num_attention_heads=params.n_heads,
            num_key_value_heads=params.n_kv_heads or params.n_heads,
            head_dim=params.dim // params.n_heads,
            max_position_embeddings=_context(params),
            rms_norm_eps=float(params.norm_eps),
            rope_theta=float(params.rope_theta),
            rope_scaling=_rope_scaling(params),
            tie_word_embeddings=HEAD not in pieces,  # Llama 3.2 is tied, and has the head in its files nevertheless
        )
    except ValueError as error:
        raise BadFile(path, str(error)) from None


def _feed_forward_size(params: _Params) -> int:
    """The width that Meta's programs compute: two thirds of 4 dim, stretched, and rounded up."""
    size = int(2 * 4 * params.dim / 3)
    if params.ffn_dim_multiplier is not None:
        size = int(params.ffn_dim_multiplier * size)
    multiple = params.multiple_of or 1
    return multiple * -(-size // multiple)


def _context(params: _Params) -> int:
    """The longest text that a model was trained on, which params.json does not say; the generations differ elsewhere.

    Llama 3.1 and later: scaled rotary frequencies. Llama 3: a base of 500,000. Code Llama: of 1,000,000. Llama 1:
    an epsilon of 1e-6, except that its 65B has 1e-5 like Llama 2, whose only model of 80 layers has grouped heads.
    """
    if params.max_seq_len:
        return params.max_seq_len
    if params.use_scaled_rope:
        return 131072
    if params.rope_theta != 10000.0:
        return 16384 if params.rope_theta == 1e6 else 8192
    llama1 = params.norm_eps == 1e-6 or (params.n_layers == 80 and params.n_kv_heads is None)
    return 2048 if llama1 else 4096


def _rope_scaling(params: _Params) -> RopeScaling | None:
    """Llama 3.1's frequencies. The factor is not in its params.json: 8, and 32 in Llama 3.2's two text models, which
    alone are narrower than 4096."""
    if not params.use_scaled_rope:
        return None
    factor = params.rope_scaling_factor or (8.0 if params.dim >= 4096 else 32.0)
    return RopeScaling("llama3", float(factor), 1.0, float(params.rope_high_freq_factor or 4.0), 8192)


# Joining


def _split_axis(name: str, pieces: list[LazyTensor], dim: int) -> int | None:
    """The axis on which the ranks' pieces follow each other; None if every rank has the whole."""
    if len(pieces[0].shape) == 1:
        return None if "norm" in name else 0
    if name == EMBEDDING:
        return 0 if pieces[0].shape[1] == dim else 1
    return 1 if name.endswith(_SPLIT_ON_COLUMNS) else 0


def _join(files: list[Path], name: str, pieces: list[LazyTensor], config: ModelConfig) -> LazyTensor:
    first, count = pieces[0], len(pieces)
    for file, piece in zip(files, pieces, strict=True):
        if (piece.shape, piece.dtype) != (first.shape, first.dtype):
            problem = f"{piece.dtype} {piece.shape}, but {files[0].name} has {first.dtype} {first.shape}"
            raise BadFile(file, problem, field=f"tensor {first.name!r}")
    if len(first.shape) not in (1, 2):
        raise BadFile(files[0], f"has {len(first.shape)} axes", field=f"tensor {first.name!r}")
    dtype = plain_dtype(files[0], first.name, first.dtype)
    axis, heads = _split_axis(name, pieces, config.hidden_size), rotary_heads(name, config)
    if axis is None:
        pieces, count = pieces[:1], 1
    if heads and (heads % count or first.shape[0] * count != heads * config.head_dim):
        problem = f"{first.shape[0]} rows a shard do not make {heads} heads of {config.head_dim} in {count} shards"
        raise BadFile(files[0], problem, field=f"tensor {first.name!r}")
    shape = list(first.shape)
    if axis is not None:
        shape[axis] *= count

    def part(piece: LazyTensor) -> NDArray[Any]:
        return to_half_split(piece.read(), heads // count) if heads else piece.read()

    def read_joined() -> NDArray[Any]:
        if count == 1:
            return part(pieces[0])
        whole = np.empty(shape, dtype)
        for place, piece in zip(np.split(whole, count, axis=axis or 0), pieces, strict=True):
            place[...] = part(piece)
        return whole

    nbytes = math.prod(shape) * dtype.itemsize
    return LazyTensor(name, tuple(shape), first.dtype, nbytes, read_joined)


def _tokenizer(folder: Path) -> TokenizerSource | None:
    """Llama 1 and 2 came as one folder a size, with the tokenizer they share in the folder above."""
    for path in (folder / "tokenizer.model", folder.absolute().parent / "tokenizer.model"):
        if tokenizer_source.present(path):
            kind = tokenizer_files.identify(path)
            if kind is None:
                raise BadFile(path, "no tokenizer of a kind that pronk knows")
            return TokenizerSource(kind, path)
    return None
