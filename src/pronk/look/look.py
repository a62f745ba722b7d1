"""Look: what a model makes of each token of a text; attention and the logit lens of the tokens that are asked for."""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pronk.config import ModelConfig
from pronk.engine.batch import PASS_TOKENS
from pronk.engine.sampling import NotNumbers
from pronk.errors import BadRequest, short
from pronk.look.lens import Lens
from pronk.look.predicted import Float64, Int, Predicted
from pronk.look.reading import Reading
from pronk.look.spelling import Spelling

MOST_ALTERNATIVES = 100


@dataclass(frozen=True)
class Alternative:
    id: int
    piece: str
    probability: float


@dataclass(frozen=True)
class Token:
    """One of a text. What is said of its prediction is None of the first token, which nothing stands before."""

    index: int
    id: int
    piece: str
    probability: float | None
    bits: float | None
    entropy: float | None
    rank: int | None
    alternatives: tuple[Alternative, ...]  # the likeliest in its place, it itself perhaps among them


class Look:
    """A text of T tokens, as `LLM.look` gives it.

    Nothing is computed before it is asked for; then the text is read once, through a KV cache of its own, which is kept
    as long as this is. Arrays have a place for each token; in the first, which nothing predicted, they have NaN (ranks
    0). Layers and heads are counted from 0. Any thread may use it. What is computed raises PronkError where the model
    was closed, where memory does not suffice, and where its logits are not numbers; arguments raise BadRequest.
    """

    def __init__(
        self,
        reading: Reading,
        config: ModelConfig,
        spelling: Spelling,
        *,
        prompt_tokens: int,
        top: int = 5,
        template_text: str | None = None,
    ) -> None:
        self.ids = np.array(reading.ids, np.int32)  # [T]
        self.prompt_tokens = prompt_tokens  # where the answer begins; T where there is none
        self.template_text = template_text  # what the chat template made of messages, raw
        self._reading, self._config, self._spelling = reading, config, spelling
        self._top = whole("top", top, 1, MOST_ALTERNATIVES)
        self._found = Predicted.empty(len(reading.ids), min(self._top, config.vocab_size))
        self._rows = 0  # of these that are there
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[Token]:
        return (self[token] for token in range(len(self)))

    def __repr__(self) -> str:
        return f"<Look at {len(self)} tokens, {self.prompt_tokens} of them the prompt's>"

    def read(self, most: int) -> bool:
        """Read the next tokens of the text, at most `most`; whether more are left. All that is said of a token needs
        the whole text, and reads what is left of it at once: this is for who has others to let pass in between."""
        with self._lock:
            ids, at = self.ids.tolist(), self._rows
            if at < len(ids):
                logits = self._reading.logits(at, most)
                self._found.fill(at, logits, [*ids[1:], None][at : at + len(logits)])
                self._rows += len(logits)
            return self._rows < len(ids)

    # -- tokens --

    @property
    def pieces(self) -> list[str]:
        """As people read them: bytes that are no whole character appear as \\xNN."""
        return [self._spelling.piece(token) for token in self.ids.tolist()]

    @property
    def bytes(self) -> list[bytes]:
        """What each token adds to the text."""
        return [self._spelling.bytes_of(token) for token in self.ids.tolist()]

    # -- predictions --

    @property
    def logprobs(self) -> Float64:
        """[T], natural logarithms, as the model has them: before temperature, penalties and filters."""
        return self._shifted(self._predicted.logprobs, np.nan)

    @property
    def bits(self) -> Float64:
        """[T], of surprise: -log2 of each token's probability."""
        return np.abs(self.logprobs / math.log(2))

    @property
    def entropy(self) -> Float64:
        """[T], in bits: of the distribution that each token was drawn from."""
        return self._shifted(self._predicted.entropies, np.nan)

    @property
    def ranks(self) -> Int:
        """[T], 1 where the likeliest token came."""
        return self._shifted(self._predicted.ranks, 0)

    @property
    def top_ids(self) -> Int:
        """[T, k], the likeliest in each token's place, best first; -1 in the first."""
        return self._shifted(self._predicted.top_ids, -1)

    @property
    def top_logprobs(self) -> Float64:
        """[T, k], of these."""
        return self._shifted(self._predicted.top_logprobs, np.nan)

    @property
    def next(self) -> tuple[Alternative, ...]:
        """What would most likely come after the text."""
        return self._alternatives(len(self))

    def __getitem__(self, token: int) -> Token:
        token = self._token(token)
        found, row = self._predicted, token - 1
        id_ = int(self.ids[token])
        if row < 0:
            return Token(0, id_, self._spelling.piece(id_), None, None, None, None, ())
        logprob = float(found.logprobs[row])
        return Token(
            token,
            id_,
            self._spelling.piece(id_),
            math.exp(logprob),
            abs(logprob / math.log(2)),
            float(found.entropies[row]),
            int(found.ranks[row]),
            self._alternatives(token),
        )

    # -- inside --

    def attention(self, token: int, layer: int, head: int | None = None) -> NDArray[np.float32]:
        """Over the text, how much a token looks at each, [T], or of all heads [H, T]: 0 behind the token, 1 in all.

        One pass over that token; what the model looked at when it chose a token is the row of the one before.
        """
        token = self._token(token)
        layer = whole("layer", layer, 0, self._config.num_hidden_layers - 1)
        if head is not None:
            head = whole("head", head, 0, self._config.num_attention_heads - 1)
        seen = self._reading.inspect(token, [layer]).attention[0]  # [H, token + 1]
        if not np.isfinite(seen).all():
            raise NotNumbers
        rows = np.zeros((len(seen), len(self)), np.float32)
        rows[:, : token + 1] = seen
        return rows if head is None else rows[head]

    def lens(self, token: int, k: int = 5) -> Lens:
        """What each layer would have said in a token's place, from 1 to T: that of `token=len(look)` comes next.

        One pass over the token before; the last row is what `look[token]` says.
        """
        if (token := whole("token", token, 0, len(self))) == 0:
            raise BadRequest(
                "nothing stands before token 0, so no layer said anything in its place; ask for one from 1 on"
            )
        k = min(whole("k", k, 1, MOST_ALTERNATIVES), self._config.vocab_size)
        logits = self._reading.inspect(token - 1, lens=True).lens
        assert logits is not None
        came = int(self.ids[token]) if token < len(self) else None
        found = Predicted.empty(len(logits), k)
        found.fill(0, logits, [came] * len(logits))
        return Lens(
            token,
            came,
            found.top_ids,
            np.exp(found.top_logprobs),
            found.entropies,
            np.exp(found.logprobs),
            found.ranks,
            self._spelling,
        )

    # -- what is shown --

    def to_dict(self, start: int = 0, stop: int | None = None) -> dict[str, Any]:
        """For JSON: tokens `start` to `stop`, and what comes next. Each token has about 60 bytes an alternative."""
        start = whole("start", start, 0, len(self))
        stop = len(self) if stop is None else whole("stop", stop, start, len(self))
        return {
            "tokens": [self._token_dict(token) for token in range(start, stop)],
            "start": start,
            "length": len(self),
            "prompt_tokens": self.prompt_tokens,
            "next": self._top_dict(len(self)),
            "template_text": self.template_text,
            "layers": self._config.num_hidden_layers,
            "heads": self._config.num_attention_heads,
        }

    def svg(self) -> str:
        """A drawing, as a file: the text, coloured by how much each token surprised the model."""
        from pronk.look import picture

        return picture.of_surprise(self)

    def attention_svg(self, token: int, layer: int, head: int | None = None) -> str:
        """The text, coloured by how much a token looks at each; without `head` the mean over heads."""
        from pronk.look import picture

        weights = self.attention(token, layer, head)
        return picture.of_attention(self, weights if head is not None else weights.mean(0), token, layer, head)

    def _repr_html_(self) -> str:
        from pronk.look import picture

        return picture.element(self.svg(), "the text, coloured by surprise") + picture.table(self)

    # -- helpers --

    @property
    def _predicted(self) -> Predicted:
        """Row n is what was said after token n."""
        with self._lock:
            while self.read(PASS_TOKENS):
                pass
            return self._found

    @staticmethod
    def _shifted(rows: NDArray[Any], first: float) -> NDArray[Any]:
        """From what was said after each token to what was said of it."""
        moved = np.empty_like(rows)
        moved[0], moved[1:] = first, rows[:-1]
        return moved

    def _alternatives(self, token: int) -> tuple[Alternative, ...]:
        found, row = self._predicted, token - 1
        pairs = zip(found.top_ids[row].tolist(), np.exp(found.top_logprobs[row]).tolist(), strict=True)
        return tuple(Alternative(id_, self._spelling.piece(id_), p) for id_, p in pairs)

    def _token_dict(self, index: int) -> dict[str, Any]:
        token = self[index]
        return {
            "index": index,
            **self._spelling.to_dict(token.id),
            "special": self._spelling.special(token.id),
            "probability": token.probability,
            "logprob": float(self._predicted.logprobs[index - 1]) if index else None,
            "bits": token.bits,
            "entropy": token.entropy,
            "rank": token.rank,
            "top": self._top_dict(index) if index else [],
        }

    def _top_dict(self, index: int) -> list[dict[str, Any]]:
        return [{**self._spelling.to_dict(a.id), "probability": a.probability} for a in self._alternatives(index)]

    def _token(self, token: int) -> int:
        return whole("token", token, 0, len(self) - 1)


def whole(name: str, value: Any, least: int, most: int) -> int:
    """`value` as a number from `least` to `most`. Raises BadRequest."""
    try:
        number = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        wanted = (
            f"a whole number from {least} to {most}" if least < most else f"{least}" if least == most else "of none"
        )
        raise BadRequest(f"{name} must be {wanted}, not {short(value)}")
    return number
