"""Random streams: the uniforms that sampling draws, one stream a sample, fixed by (seed, sample, step).

Sample 0 of a request draws what the request would draw alone; every other sample has a stream of its own that the same
seed fixes. No stream knows of the batch it runs in.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Literal, Protocol, get_args

import numpy as np

from pronk.errors import BadRequest

Rng = Literal["philox", "xorshift", "numpy"]
RNGS: tuple[str, ...] = get_args(Rng)

_U64 = (1 << 64) - 1
# xorshift's only fixed point is 0; NumPy's legacy generator takes 32 bits.
_SEEDS = {"philox": (0, _U64), "xorshift": (1, _U64), "numpy": (0, (1 << 32) - 1)}


class Stream(Protocol):
    def uniform(self, step: int) -> float:
        """The number in [0, 1) that step `step` (0 is the first generated token) uses; the same however often asked."""


def effective_seed(seed: int | None) -> int:
    """`seed`, or a fresh one that every generator takes (31 bits, not 0)."""
    return 1 + secrets.randbelow((1 << 31) - 1) if seed is None else seed


def check_seed(rng: str, seed: int) -> None:
    """Raises BadRequest for a seed that the generator cannot take."""
    low, high = _SEEDS[rng]
    if isinstance(seed, bool) or not isinstance(seed, int) or not low <= seed <= high:
        raise BadRequest(f"seed must be a whole number from {low} to {high} with rng={rng!r}, not {seed!r}")


def stream(rng: str, seed: int, sample: int = 0) -> Stream:
    """The stream of one sample. Raises BadRequest for a seed out of the generator's range."""
    check_seed(rng, seed)
    kinds: dict[str, Callable[[int, int], Stream]] = {"philox": Philox, "xorshift": Xorshift, "numpy": NumpyLegacy}
    return kinds[rng](seed, sample)


class Philox:
    """Philox 4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) as NumPy has it.

    The key is (seed, sample) and the counter is the step, so any step's number is had without the ones before it.
    """

    def __init__(self, seed: int, sample: int) -> None:
        self._key = seed, sample

    def uniform(self, step: int) -> float:
        """From a block's first word. In Python: to make one of NumPy's generators takes four times as long."""
        k0, k1 = self._key
        c0, c1, c2, c3 = (((step + 1) >> bits) & _U64 for bits in (0, 64, 128, 192))
        for _ in range(10):
            a, b = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
            c0, c1, c2, c3 = (b >> 64) ^ c1 ^ k0, b & _U64, (a >> 64) ^ c3 ^ k1, a & _U64
            k0, k1 = (k0 + 0x9E3779B97F4A7C15) & _U64, (k1 + 0xBB67AE8584CAA73B) & _U64
        return (c0 >> 11) * 2.0**-53


class Xorshift:
    """xorshift64* with 24-bit coins, as llama2.c's run.c draws them: one a sampled token, none for the prompt."""

    def __init__(self, seed: int, sample: int) -> None:
        # Of every step so far, for a draft that was wrong has its steps asked for again.
        self._states = [seed if sample == 0 else _split(seed, sample)]

    def uniform(self, step: int) -> float:
        while len(self._states) <= step + 1:
            state = self._states[-1]
            state ^= state >> 12
            state ^= (state << 25) & _U64
            state ^= state >> 27
            self._states.append(state)
        return (((self._states[step + 1] * 0x2545F4914F6CDD1D) & _U64) >> 40) / 16777216.0


class NumpyLegacy:
    """The doubles of np.random.RandomState(seed).random_sample(), which RandomState.choice draws too (MT19937)."""

    def __init__(self, seed: int, sample: int) -> None:
        self._seed = seed if sample == 0 else [seed, sample]
        self._numbers: list[float] = []

    def uniform(self, step: int) -> float:
        if step >= len(self._numbers):
            self._numbers = np.random.RandomState(self._seed).random_sample(2 * step + 64).tolist()
        return self._numbers[step]


def _split(seed: int, sample: int) -> int:
    """A seed of its own for each sample: splitmix64's finaliser (Steele et al., 2014) over a Weyl sequence; never 0."""
    z = (seed + sample * 0x9E3779B97F4A7C15) & _U64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _U64
    return (z ^ (z >> 31)) or 1
