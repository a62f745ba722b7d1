"""A model of a given shape with random weights, as a bf16 GGUF file: speed needs no sense.

    python bench/random_model.py tinyllama-1.1b.gguf [--seed 0]

The shape is TinyLlama's (1.1 billion weights): 22 layers, hidden 2048, FFN 5632, 32 heads, 4 KV heads, untied. Weights
are normal(0, 0.02); norms are ones. The vocabulary is made up, so that text is written at its usual cost.
"""

from __future__ import annotations

import argparse
import math
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from pronk.checkpoint.tensors import Checkpoint, LazyTensor
from pronk.checkpoint.writers import write
from pronk.config import ModelConfig
from pronk.tokenizer.vocabulary import TokenType, Vocabulary

TINYLLAMA = ModelConfig(
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=22,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=64,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    bos_token_id=1,
    eos_token_ids=(2,),
)
LLAMA2_7B = ModelConfig(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    head_dim=128,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
    bos_token_id=1,
    eos_token_ids=(2,),
)
_BF16 = np.dtype(ml_dtypes.bfloat16)


def random_checkpoint(config: ModelConfig, seed: int) -> Checkpoint:
    """Tensors that are made when they are read, each from a seed of its own."""

    def lazy(name: str, shape: tuple[int, ...]) -> LazyTensor:
        def read() -> NDArray[Any]:
            if len(shape) == 1:
                return np.ones(shape, np.float32)
            numbers = np.random.default_rng([seed, zlib.crc32(name.encode())])
            return (numbers.standard_normal(shape, np.float32) * np.float32(0.02)).astype(_BF16)

        width = 4 if len(shape) == 1 else 2
        return LazyTensor(name, shape, "F32" if width == 4 else "BF16", math.prod(shape) * width, read)

    tensors = {name: lazy(name, shape) for name, shape in config.tensor_shapes().items()}
    return Checkpoint(Path(f"random-{seed}"), "random", config, tensors)


def made_up_vocabulary(size: int) -> Vocabulary:
    """Control tokens, bytes, and words that are numbers."""
    fixed = [("<unk>", TokenType.UNKNOWN), ("<s>", TokenType.CONTROL), ("</s>", TokenType.CONTROL)]
    fixed += [(f"<0x{byte:02X}>", TokenType.BYTE) for byte in range(256)]
    words = [(f"\u2581w{number}", TokenType.NORMAL) for number in range(size - len(fixed))]
    tokens, types = zip(*fixed, *words, strict=True)
    scores = tuple(-float(number) for number in range(size))
    return Vocabulary("spm", tokens, types, scores, bos_id=1, eos_id=2, unk_id=0, add_bos=True)


def write_random(path: Path, config: ModelConfig = TINYLLAMA, seed: int = 0) -> None:
    vocabulary = made_up_vocabulary(config.vocab_size)
    write.save(random_checkpoint(config, seed), path, to="gguf", dtype="bf16", vocabulary=vocabulary)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write_random(options.path, seed=options.seed)


if __name__ == "__main__":
    main()
