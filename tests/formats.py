"""Writes models as other programs do: Hugging Face's folders with the safetensors package, Meta's shards with torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import ml_dtypes
import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from pronk.config import ModelConfig

if TYPE_CHECKING:
    import torch

Weights = Mapping[str, NDArray[Any]]

_META_NAMES = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "layers",
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
}


def save_huggingface(
    folder: Path,
    config: ModelConfig,
    weights: Weights,
    shards: int = 1,
    dtype: Any = None,
    container: Literal["safetensors", "bin"] = "safetensors",
) -> Path:
    """`dtype`: a numpy type to convert to. Several shards have their tensors dealt out in turn, and an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict(), indent=2))
    weights = {name: np.asarray(array, dtype, order="C") for name, array in weights.items()}
    stem = "model" if container == "safetensors" else "pytorch_model"
    names = [f"{stem}-{i + 1:05d}-of-{shards:05d}.{container}" for i in range(shards)]
    if shards == 1:
        names = [f"{stem}.{container}"]
    else:
        weight_map = {name: names[i % shards] for i, name in enumerate(weights)}
        index = {"metadata": {"total_size": sum(a.nbytes for a in weights.values())}, "weight_map": weight_map}
        (folder / f"{stem}.{container}.index.json").write_text(json.dumps(index))
    for i, name in enumerate(names):
        part = {key: array for j, (key, array) in enumerate(weights.items()) if j % shards == i}
        if container == "safetensors":
            safetensors.numpy.save_file(part, folder / name, metadata={"format": "pt"})
        else:
            import torch

            torch.save({key: as_torch(array) for key, array in part.items()}, folder / name)
    return folder


def save_meta(
    folder: Path,
    config: ModelConfig,
    weights: Weights,
    shards: int = 1,
    embedding_split: Literal["columns", "rows"] = "rows",
) -> Path:
    """As model-parallel training of `shards` ranks left it; `embedding_split` is "columns" in Llama 1 and 2."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "params.json").write_text(json.dumps(meta_params(config)))
    for rank in range(shards):
        state = {}
        for name, array in weights.items():
            if name.endswith("q_proj.weight"):
                array = interleave(array, config.num_attention_heads)
            if name.endswith("k_proj.weight"):
                array = interleave(array, config.num_key_value_heads)
            if "norm" in name:
                part = array
            else:
                columns = "o_proj" in name or "down_proj" in name
                if name == "model.embed_tokens.weight":
                    columns = embedding_split == "columns"
                part = np.array_split(array, shards, axis=1 if columns else 0)[rank]
            state[meta_name(name)] = as_torch(np.ascontiguousarray(part))
        state["rope.freqs"] = torch.ones(config.head_dim // 2)
        torch.save(state, folder / f"consolidated.{rank:02d}.pth")
    return folder


def meta_name(name: str) -> str:
    for ours, theirs in _META_NAMES.items():
        name = name.replace(ours, theirs)
    return name


def meta_params(config: ModelConfig) -> dict[str, Any]:
    params: dict[str, Any] = {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "vocab_size": config.vocab_size,
        "multiple_of": 1,
        # Half a unit more than needed, because Meta's formula cuts off the fraction.
        "ffn_dim_multiplier": (config.intermediate_size + 0.5) / int(2 * 4 * config.hidden_size / 3),
        "norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_seq_len": config.max_position_embeddings,
    }
    if scaling := config.rope_scaling:
        assert (scaling.rope_type, scaling.original_max_position_embeddings) == ("llama3", 8192)
        params |= {"use_scaled_rope": True, "rope_scaling_factor": scaling.factor}
        params |= {"rope_high_freq_factor": scaling.high_freq_factor}
    assert config.head_dim * config.num_attention_heads == config.hidden_size
    return params


def interleave(array: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows from Hugging Face's order to Meta's, one row at a time: pair i of a head is rows 2i and 2i + 1."""
    dim = array.shape[0] // heads
    order = [head * dim + half * dim // 2 + i for head in range(heads) for i in range(dim // 2) for half in range(2)]
    return array[order]


def as_torch(array: NDArray[Any]) -> torch.Tensor:
    import torch

    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())
