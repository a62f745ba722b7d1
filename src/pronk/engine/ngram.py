"""Drafter: guesses a sequence's next tokens from its own past (prompt lookup decoding, Saxena 2023).

Where the newest tokens have occurred before, what followed them then is the draft. Text that quotes, edits or repeats
itself is guessed well, other text badly; so a drafter keeps an account and pauses while guessing does not pay. The
account counts tokens and measures no time: the same sequence makes the same drafts on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_DRAFT = 8
_PASS_COST = 1 / 8  # of one drafted token, in forward passes, while a pass is bound by reading the weights
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 256  # in tokens
_LONGEST_MATCH = 8
_CANDIDATES = 32  # earlier occurrences looked at


class Drafter:
    """Of one sequence, whose tokens are only ever added to."""

    def __init__(self) -> None:
        # As in LZ77: where each pair of tokens last ended, and for every such place the one before with the same pair.
        self._latest: dict[tuple[int, int], int] = {}
        self._before: list[int] = [-1, -1]
        self._length = MAX_DRAFT // 2
        self._credit = 1.0  # forward passes saved less those spent
        self._pause = _FIRST_PAUSE
        self._resume_at = 0

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """At most `limit` tokens that may follow; often none."""
        if limit < 1 or len(tokens) < max(3, self._resume_at):
            return []
        self._index(tokens)
        at = self._longest_match(tokens)
        if at < 0:
            return []
        draft: list[int] = []
        for place in range(at, at + min(limit, self._length)):  # may run into the draft itself: a loop is continued
            draft.append(tokens[place] if place < len(tokens) else draft[place - len(tokens)])
        return draft

    def observe(self, drafted: int, accepted: int, tokens: int) -> None:
        """How a draft fared, and how many tokens the sequence has now."""
        self._length = min(2 * drafted, MAX_DRAFT) if accepted == drafted else accepted + 1
        self._credit = min(self._credit + accepted - drafted * _PASS_COST, 2.0)
        if self._credit < 0:
            self._credit, self._resume_at = 0.5, tokens + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        elif self._credit >= 1:
            self._pause = _FIRST_PAUSE

    def _index(self, tokens: Sequence[int]) -> None:
        for end in range(len(self._before), len(tokens)):
            pair = tokens[end - 2], tokens[end - 1]
            self._before.append(self._latest.get(pair, -1))
            self._latest[pair] = end

    def _longest_match(self, tokens: Sequence[int]) -> int:
        """The position after the longest earlier occurrence of the newest tokens, of equals the latest; -1 for none."""
        best, best_length = -1, 0
        end, size = self._latest.get((tokens[-2], tokens[-1]), -1), len(tokens)
        for _ in range(_CANDIDATES):
            if end < 0:
                break
            length = 2
            while length < min(_LONGEST_MATCH, end) and tokens[end - length - 1] == tokens[size - length - 1]:
                length += 1
            if length > best_length:
                best, best_length = end, length
            if length == _LONGEST_MATCH:
                break
            end = self._before[end]
        return best
