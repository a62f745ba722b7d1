"""What a run of rewards begins from: a model with a score head in the place of its lm_head.

The head is drawn as in Stiennon et al. (arXiv 2009.01325): normal, with a variance of 1 / (C + 1), so that a text's
score is about as large as its last hidden state's numbers are. A reward model that is trained on keeps its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pronk.checkpoint.tensors import SCORE, Checkpoint, LazyTensor, without_head
from pronk.errors import BadRequest
from pronk.tokenizer import Tokenizer

_SETTINGS, _OVERRULES = "tokenizer_config.json", "special_tokens_map.json"  # files that name a token to pad with


def with_score(checkpoint: Checkpoint, tokenizer: Tokenizer, seed: int) -> Checkpoint:
    """Raises BadRequest where there is no token to pad with."""
    config = replace(checkpoint.config, num_labels=1, pad_token_id=padding(tokenizer))
    tensors = without_head(checkpoint.tensors)
    if SCORE not in tensors:
        size = config.hidden_size
        tensors[SCORE] = LazyTensor.made(SCORE, (1, size), partial(_drawn, size, seed))
    return replace(checkpoint, config=config, tensors=tensors)


def _drawn(size: int, seed: int) -> NDArray[np.float32]:
    draw = np.random.Generator(np.random.PCG64([seed, size]))
    return draw.standard_normal((1, size), np.float32) * np.float32((size + 1) ** -0.5)


def padding(tokenizer: Tokenizer) -> int:
    """A token that no text ends with. transformers scores the last token that is another; one that ends texts, with
    which many models pad, would have it score the token before."""
    for token in (tokenizer.pad_id, tokenizer.unk_id, tokenizer.bos_id):
        if token is not None and token not in tokenizer.eos_ids:
            return token
    raise BadRequest(
        "this tokenizer has no token to pad with but those that end texts; add a pad_token to its settings"
    )


def padded(files: Mapping[str, bytes], tokenizer: Tokenizer) -> dict[str, bytes]:
    """A tokenizer's files, which name that token to pad with."""
    settings: dict[str, Any] = json.loads(files.get(_SETTINGS, b"{}"))
    settings["pad_token"] = tokenizer.token_text(padding(tokenizer))
    found = {name: content for name, content in files.items() if name != _OVERRULES or not _overrules(content)}
    return found | {_SETTINGS: (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()}


def _overrules(content: bytes) -> bool:
    """Whether older versions of transformers would take another token from it, or none from a file that is no JSON."""
    try:
        return "pad_token" in json.loads(content)
    except (ValueError, TypeError, RecursionError):
        return True
