"""Names of tensors in Meta's files and in GGUF, against Hugging Face's, and the two layouts of rotary embeddings.

llama2.c files hold no names: their tensors stand in a fixed order, and their layout of rotary embeddings is Meta's.
"""

from __future__ import annotations

import re
from typing import Any

from numpy.typing import NDArray

from pronk.config import ModelConfig
from pronk.errors import Unsupported

# Hugging Face, Meta, GGUF; "{}" is the number of the layer. Linears may have a bias beside their weight.
_LINEARS = (
    ("model.layers.{}.self_attn.q_proj", "layers.{}.attention.wq", "blk.{}.attn_q"),
    ("model.layers.{}.self_attn.k_proj", "layers.{}.attention.wk", "blk.{}.attn_k"),
    ("model.layers.{}.self_attn.v_proj", "layers.{}.attention.wv", "blk.{}.attn_v"),
    ("model.layers.{}.self_attn.o_proj", "layers.{}.attention.wo", "blk.{}.attn_output"),
    ("model.layers.{}.mlp.gate_proj", "layers.{}.feed_forward.w1", "blk.{}.ffn_gate"),
    ("model.layers.{}.mlp.down_proj", "layers.{}.feed_forward.w2", "blk.{}.ffn_down"),
    ("model.layers.{}.mlp.up_proj", "layers.{}.feed_forward.w3", "blk.{}.ffn_up"),
)
_WEIGHTS = (
    ("model.layers.{}.input_layernorm", "layers.{}.attention_norm", "blk.{}.attn_norm"),
    ("model.layers.{}.post_attention_layernorm", "layers.{}.ffn_norm", "blk.{}.ffn_norm"),
    ("model.embed_tokens", "tok_embeddings", "token_embd"),
    ("model.norm", "norm", "output_norm"),
    ("lm_head", "output", "output"),
)
_ROWS = [
    *(tuple(name + suffix for name in row) for row in _LINEARS for suffix in (".weight", ".bias")),
    *(tuple(name + ".weight" for name in row) for row in _WEIGHTS),
]
_META_TO_HF = {meta: hf for hf, meta, _ in _ROWS}
_GGUF_TO_HF = {gguf: hf for hf, _, gguf in _ROWS}
_HF_TO_GGUF = {hf: gguf for hf, _, gguf in _ROWS}

# One spelling a layer: "01" would let two names of a file mean the same tensor.
_LAYER = re.compile(r"(?<=\.)(0|[1-9][0-9]{0,5})(?=\.)")


def meta_to_hf(name: str) -> str | None:
    """None for a name that Meta's models do not have."""
    return _rename(name, _META_TO_HF)


def gguf_to_hf(name: str) -> str | None:
    """None for a name that a LLaMA model in GGUF does not have (`rope_freqs.weight` included: it is configuration)."""
    return _rename(name, _GGUF_TO_HF)


def hf_to_gguf(name: str) -> str:
    """Raises Unsupported for a name outside the table."""
    renamed = _rename(name, _HF_TO_GGUF)
    if renamed is None:
        raise Unsupported(f"tensor {name!r} has no name in GGUF")
    return renamed


def _rename(name: str, table: dict[str, str]) -> str | None:
    found = _LAYER.search(name)
    if found is None:
        return None if "{}" in name else table.get(name)
    renamed = table.get(name[: found.start()] + "{}" + name[found.end() :])
    return renamed and renamed.format(found[0])


def rotary_heads(name: str, config: ModelConfig) -> int | None:
    """How many heads the rows of this tensor (a Hugging Face name) are, if rotary embeddings turn them; None if not."""
    if name.endswith((".self_attn.q_proj.weight", ".self_attn.q_proj.bias")):
        return config.num_attention_heads
    if name.endswith((".self_attn.k_proj.weight", ".self_attn.k_proj.bias")):
        return config.num_key_value_heads
    return None


def to_half_split(array: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows [heads * D, ...] from Meta's layout, where rows 2i and 2i + 1 of a head turn together (llama2.c and GGUF
    too), to Hugging Face's, where rows i and i + D/2 do. A copy, of any dtype and any number of trailing axes."""
    return _swap(array, heads, (-1, 2))


def to_interleaved(array: NDArray[Any], heads: int) -> NDArray[Any]:
    """The inverse of `to_half_split`."""
    return _swap(array, heads, (2, -1))


def _swap(array: NDArray[Any], heads: int, pairs: tuple[int, int]) -> NDArray[Any]:
    turned: NDArray[Any] = array.reshape(heads, *pairs, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    return turned
