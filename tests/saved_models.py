"""Vocabularies to save beside a model, and what a saved model is held to."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from pronk.checkpoint.tensors import Checkpoint
from pronk.tokenizer.vocabulary import TokenType, Vocabulary

NUMPY = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
LLAMA2C_ENDS = (2, 1)  # what a llama2.c file always says


def spm(size: int = 512) -> Vocabulary:
    """As SentencePiece lays one out: <unk>, <s>, </s>, 256 bytes, then pieces with a space mark."""
    pieces = [f"\u2581p{i}" for i in range(size - 259)]
    return Vocabulary(
        model="spm",
        tokens=("<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces),
        types=(
            *(TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL),
            *(TokenType.BYTE,) * 256,
            *(TokenType.NORMAL,) * len(pieces),
        ),
        scores=(*(0.0,) * 259, *(-float(i) for i in range(len(pieces)))),
        bos_id=1,
        eos_id=2,
        unk_id=0,
        add_bos=True,
        add_space_prefix=True,
    )


def bpe() -> Vocabulary:
    return Vocabulary(
        model="bpe",
        tokens=("<|end|>", "a", "b", "Ġa", "ab"),
        types=(TokenType.CONTROL, *(TokenType.NORMAL,) * 4),
        merges=("Ġ a", "a b"),
        pre="smollm",
        eos_id=0,
        chat_template="{{ messages }}",
    )


def numbers(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    return {name: tensor.read() for name, tensor in checkpoint.tensors.items()}


def assert_same(found: Checkpoint, weights: dict[str, np.ndarray]) -> None:
    assert found.tensors.keys() == weights.keys()
    for name, array in weights.items():
        assert found.tensors[name].read().tobytes() == array.tobytes(), name
