"""What llama2.c's run.c does, in numpy and float64: its files, its tokenizer, its forward pass and its greedy loop.

Written from its description of the format (version 0): 7 integers, then float32 tensors without names, rotary pairs
side by side. Nothing here is pronk's. test_llama2c_goldens.py holds it against what run.c itself printed.
"""

from __future__ import annotations

import math
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class RunCTokenizer:
    """Encoding and decoding: the best-scoring pair first, bytes for what no token spells."""

    def __init__(self, path: Path) -> None:
        raw, at = path.read_bytes(), 4  # the length of the longest token stands first
        self.tokens: list[bytes] = []
        self.scores: list[float] = []
        while at < len(raw):
            score, length = struct.unpack_from("<fi", raw, at)
            self.scores.append(score)
            self.tokens.append(raw[at + 8 : at + 8 + length])
            at += 8 + length
        self.ids = {token: i for i, token in enumerate(self.tokens)}

    def encode(self, text: str) -> list[int]:
        ids = [self.ids[b" "]] if text else []
        for character in text:
            # SentencePiece, unlike C, reads U+2581 as the space it stands for.
            encoded = character.replace("\u2581", " ").encode()
            ids += [self.ids[encoded]] if encoded in self.ids else [byte + 3 for byte in encoded]
        while True:
            best, at, token = -1e10, -1, -1
            for i, (a, b) in enumerate(pairwise(ids)):
                merged = self.ids.get(self.tokens[a] + self.tokens[b])
                if merged is not None and self.scores[merged] > best:
                    best, at, token = self.scores[merged], i, merged
            if at < 0:
                return [1, *ids]
            ids[at : at + 2] = [token]

    def piece(self, previous: int, token: int) -> bytes:
        spelled = self.tokens[token]
        if previous == 1:
            spelled = spelled.removeprefix(b" ")
        return bytes((int(spelled[3:5], 16),)) if spelled[:3] == b"<0x" else spelled


class RunCModel:
    """A model of version 0, one token after another."""

    def __init__(self, path: Path) -> None:
        raw = path.read_bytes()
        dim, hidden, layers, heads, kv_heads, vocab, self.context = struct.unpack_from("<7i", raw)
        numbers = np.frombuffer(raw, "<f4", offset=28).astype(np.float64)
        at = 0

        def take(*shape: int) -> Array:
            nonlocal at
            at += math.prod(shape)
            return numbers[at - math.prod(shape) : at].reshape(shape)

        self.head_size = dim // heads
        kv_dim = self.head_size * kv_heads
        self.embedding = take(abs(vocab), dim)
        self.attention_norm = take(layers, dim)
        self.wq, self.wk, self.wv = take(layers, dim, dim), take(layers, kv_dim, dim), take(layers, kv_dim, dim)
        self.wo, self.mlp_norm = take(layers, dim, dim), take(layers, dim)
        self.w1, self.w2, self.w3 = take(layers, hidden, dim), take(layers, dim, hidden), take(layers, hidden, dim)
        self.norm = take(dim)
        take(2, self.context, self.head_size // 2)  # tables of angles that nobody reads any more
        self.head = self.embedding if vocab > 0 else take(-vocab, dim)
        assert at == len(numbers)
        self.keys: list[list[Array]] = [[] for _ in range(layers)]
        self.values: list[list[Array]] = [[] for _ in range(layers)]

    def forward(self, token: int, position: int) -> Array:
        """Logits of the next token, [V]."""
        x = self.embedding[token]
        for layer in range(len(self.keys)):
            h = _norm(x, self.attention_norm[layer])
            q, k, v = ((w[layer] @ h).reshape(-1, self.head_size) for w in (self.wq, self.wk, self.wv))
            self.keys[layer].append(self._turned(k, position))
            self.values[layer].append(v)
            keys, values = np.stack(self.keys[layer]), np.stack(self.values[layer])  # [positions, K, D]
            group = len(q) // len(k)
            out = np.empty_like(q)
            for head, query in enumerate(self._turned(q, position)):
                weights = np.exp(keys[:, head // group] @ query / math.sqrt(self.head_size))
                out[head] = weights @ values[:, head // group] / weights.sum()
            x = x + self.wo[layer] @ out.reshape(-1)
            h = _norm(x, self.mlp_norm[layer])
            gate = self.w1[layer] @ h
            x = x + self.w2[layer] @ (gate / (1 + np.exp(-gate)) * (self.w3[layer] @ h))
        return self.head @ _norm(x, self.norm)

    def _turned(self, heads: Array, position: int) -> Array:
        """Pairs (2 i, 2 i + 1) of [heads, D], each by its angle."""
        angle = position / 10000.0 ** (np.arange(0, self.head_size, 2) / self.head_size)
        a, b = heads[:, 0::2], heads[:, 1::2]
        pairs = (a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle))
        return np.stack(pairs, axis=-1).reshape(heads.shape)


def _norm(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x * x).mean() + 1e-5) * weight


def run_c(model: Path, tokenizer: Path, prompt: str, steps: int) -> bytes:
    """What `run MODEL -z TOKENIZER -t 0 -n STEPS -i PROMPT` prints, less the newline at its end."""
    program, codec = RunCModel(model), RunCTokenizer(tokenizer)
    given, token, printed = codec.encode(prompt), 1, b""
    for position in range(min(steps, program.context)):
        logits = program.forward(token, position)
        following = given[position + 1] if position + 1 < len(given) else int(logits.argmax())
        if following == 1:
            break
        printed += codec.piece(token, following)
        token = following
    return printed
