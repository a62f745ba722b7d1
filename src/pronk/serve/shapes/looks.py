"""Answers of /v1/look."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from pronk.serve.shapes.common import Shape


class Piece(Shape):
    """A token as the tokenizer spells it."""

    id: int
    piece: str
    bytes: list[int]


class Likely(Piece):
    probability: float


class LookedAt(Piece):
    """A token of the text; what is said of it is None for the first, which follows nothing."""

    index: int
    special: bool
    probability: float | None
    logprob: float | None
    bits: float | None
    entropy: float | None
    rank: int | None
    top: list[Likely]


class Attention(Shape):
    """One row of weights, or one of each head."""

    token: int
    layer: int
    head: int | None
    weights: list[Any]


class LensLayer(Shape):
    layer: int
    entropy: float
    probability: float | None
    rank: int | None
    top: list[Likely]


class Lens(Shape):
    token: int
    came: Piece | None
    layers: list[LensLayer]


class LookAnswer(Shape):
    """Tokens from `start` on, and what would come behind the last. `id` names the look for later requests."""

    id: str
    object: Literal["look"]
    created: int
    model: str
    tokens: list[LookedAt]
    start: int
    length: int
    prompt_tokens: int
    next: list[Likely]
    template_text: str | None
    layers: int
    heads: int
    attention: Attention | UnsetType = UNSET
    lens: Lens | UnsetType = UNSET
