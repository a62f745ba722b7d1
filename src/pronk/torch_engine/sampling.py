"""Sampling on the device: the tokens of pronk.engine.sampling, to the last, of many rows at once.

Weights of tokens are whole numbers made by sums and products that are each rounded once, and their sums are exact: so
it makes no difference who adds them up. What a penalty, a grammar or reported probabilities need stays on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pronk.engine.filters import ONE
from pronk.engine.params import SamplingParams
from pronk.engine.predictions import Ask
from pronk.engine.sampling import DRAWS


def can_sample(ask: Ask) -> bool:
    params = ask.params
    plain = ask.allowed is None and params.logprobs is None and not params.logit_bias and not params.penalizes
    return plain and not params.takes_likeliest and DRAWS[params.rng].own is None


def sample(logits: Tensor, params: Sequence[SamplingParams], coins: Sequence[float]) -> Tensor:
    """Logits [R, V] whose largest are finite, and for each row what it is drawn with -> tokens [R] int64."""
    columns = logits.shape[1]

    def of(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(logits.device, non_blocking=True).unsqueeze(1)  # [R, 1]

    scores = _divided(logits.float(), of([p.temperature for p in params], torch.float32))
    coin = of(coins, torch.float64)
    if not any(p.filters for p in params):
        return _inverse_cdf(_weights(_exponentials(scores, scores.amax(1, keepdim=True))), coin)
    best_first, token = scores.sort(dim=1, descending=True, stable=True)
    likelihood = _exponentials(best_first, best_first[:, :1])
    # A filter leaves the first so many, and each works on what the one before left.
    rank = torch.arange(columns, device=logits.device)
    weigh = _weights(likelihood) * (rank < of([p.top_k or columns for p in params], torch.int64))
    spare = of([1.0 - p.top_p if p.top_p < 1 else -1.0 for p in params], torch.float32)
    total = weigh.sum(1, keepdim=True)
    dropped = ((total - weigh.cumsum(1)).double() / total.double()).float()
    enough = (dropped <= spare).to(torch.int32)
    kept = (enough.cumsum(1) - enough == 0) & (likelihood >= of([p.min_p for p in params], torch.float32))
    return _inverse_cdf(torch.zeros_like(weigh).scatter_(1, token, weigh * kept), coin)


def _divided(scores: Tensor, temperature: Tensor) -> Tensor:
    largest = scores.amax(1, keepdim=True)
    beyond = ~(largest / temperature).isfinite()
    return torch.where(beyond, scores - largest, scores) / temperature


def _exponentials(scores: Tensor, largest: Tensor) -> Tensor:
    """See pronk.engine.filters.exponentials."""
    x = (scores - largest).clamp_(min=-40)
    n = (x * 1.44269504).round_()
    x -= n * 0.693359375
    x -= n * -2.12194440e-4
    power = torch.full_like(x, 1 / 5040)
    for factorial in (720, 120, 24, 6, 2, 1, 1):
        power *= x
        power += 1 / factorial
    return torch.ldexp(power, n)


def _weights(likelihood: Tensor) -> Tensor:
    return (likelihood.double() * ONE).round_().long()


def _inverse_cdf(weigh: Tensor, coin: Tensor) -> Tensor:
    """In vocabulary order: the first place where the weights so far exceed the coin's share of all."""
    cdf = weigh.cumsum(1)
    total = cdf[:, -1:]
    share = torch.minimum((coin * total.double()).long(), total - 1)
    return (cdf <= share).sum(1)
