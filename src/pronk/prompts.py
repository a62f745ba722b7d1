"""Prompts as callers hand them over, told apart and checked: texts, token ids, lists of either."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Literal, get_args

from pronk.errors import BadRequest

Prompt = str | Sequence[int]  # text, or token ids taken as they are
Truncate = Literal["left", "right"]


def as_list(prompt: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """The prompts, and whether they came as a list of several. An empty list is none of them."""
    if isinstance(prompt, str):
        return [prompt], False
    items = _items(prompt, "a prompt is a text or a list of token ids")
    if not items or isinstance(items[0], str) or _is_sequence(items[0]):
        return items, True
    return [items], False


def token_ids(prompt: Sequence[int], vocab_size: int) -> list[int]:
    """Token ids as Python has whole numbers, whoever's they were: numpy's and torch's among others."""
    try:
        ids = [operator.index(i) for i in _items(prompt, "token ids come as a list of whole numbers")]
    except TypeError:
        raise BadRequest("token ids are whole numbers; a prompt is a text, or a list of those") from None
    if bad := [i for i in ids if not 0 <= i < vocab_size]:
        raise BadRequest(f"token id {bad[0]} is outside the vocabulary of {vocab_size}")
    return ids


def check_truncate(side: Truncate | None) -> None:
    if side is not None and side not in get_args(Truncate):
        raise BadRequest(f"truncate must be 'left' or 'right', not {side!r}")


def cut(ids: list[int], keep: int, side: Truncate, bos: int | None) -> list[int]:
    """A cut on the left spares the token that begins the text."""
    if side == "right":
        return ids[:keep]
    return ids[:1] + ids[len(ids) - keep + 1 :] if ids[0] == bos and keep > 1 else ids[-keep:]


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) or getattr(value, "ndim", 0) > 0


def _items(value: Any, wanted: str) -> list[Any]:
    """Arrays and tensors, of whichever library, are the lists they would print as."""
    if getattr(value, "ndim", 0) and hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray | memoryview):
        raise BadRequest(f"{wanted}, not {type(value).__name__}")
    return list(value)
