"""The reward that both sides of bench/grpo.py are given: cheap, and hardly ever the same twice in a group."""

from __future__ import annotations

from typing import Any


def vowels(prompt: str, completion: str, record: dict[str, Any]) -> float:
    """The share of the completion's letters that are vowels."""
    letters = [letter for letter in completion.lower() if letter.isalpha()]
    return sum(letter in "aeiou" for letter in letters) / max(1, len(letters))
