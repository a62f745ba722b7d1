"""Memory: what a variant will take, known before anything is loaded. Bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pronk.checkpoint.tensors import Checkpoint
from pronk.engine.prefix_cache import BLOCK_SIZE

_FIRST_BLOCKS = 4  # that a PrefixCache begins with
_PASS = 512  # tokens of the passes that a scheduler makes
_TORCH_BYTES = {"f32": 4, "bf16": 2, "f16": 2}


@dataclass(frozen=True)
class Prediction:
    """What a variant adds to a process that has its libraries and its tokenizer loaded already."""

    weights: int
    kv_a_token: int
    besides: int  # what a forward pass needs, and what else there is at the peak

    def total(self, baseline: int, tokens: int) -> int:
        """The peak of a process that held `baseline` before loading and then runs one text of `tokens` tokens."""
        return baseline + self.weights + kv_blocks(tokens) * BLOCK_SIZE * self.kv_a_token + self.besides


def kv_blocks(tokens: int, texts: int = 1) -> int:
    """The most blocks of keys and values that `texts` hold side by side on their way to so many tokens each.

    A cache doubles as it fills (PrefixCache.make_room), and the smaller one stays until it is copied.
    """
    needed, size, most = texts * -(-tokens // BLOCK_SIZE), _FIRST_BLOCKS, 0
    while size < needed:
        most = 2 * size
        size *= 2
    return max(needed, most)


def predict(checkpoint: Checkpoint, engine: str, options: Mapping[str, Any]) -> Prediction:
    """`options`: those of pronk.load. Raises BadRequest for a format that the engine does not have."""
    if engine == "torch":
        return _predict_torch(checkpoint, options)
    from pronk.cpu_engine.plan import plan

    found = plan(checkpoint, options.get("quantize") or "auto", options.get("kv_dtype"))
    return Prediction(found.weights, found.kv_a_token, found.a_pass)


def _predict_torch(checkpoint: Checkpoint, options: Mapping[str, Any]) -> Prediction:
    """Weights as plain tensors; in 8 bits, with the head and the embedding as they are computed in."""
    config, width = checkpoint.config, _TORCH_BYTES[options.get("dtype") or "f32"]
    on_cpu = not str(options.get("device") or "cpu").startswith("cuda")
    loaded = checkpoint.plan(width, head_apart=on_cpu).loaded
    if options.get("quantize"):
        linear = sum(
            rows * columns
            for name, (rows, *rest) in config.tensor_shapes().items()
            if name.startswith("model.layers.")
            for columns in rest
        )
        loaded -= linear * (width - 1)
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * width
    widest = 4 * config.hidden_size + 3 * config.intermediate_size + config.num_attention_heads * config.head_dim
    # On a CPU, pages of the file that have been read stay mapped until the model is loaded.
    file = sum(tensor.nbytes for tensor in checkpoint.tensors.values()) if on_cpu else 0
    return Prediction(loaded, kv, file + _PASS * widest * width)
