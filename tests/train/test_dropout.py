"""Dropout by what is left out: how much, where, and that it is the same again from the same random state."""

from __future__ import annotations

import pytest
import torch

from pronk.train.dropout import drop, without


@pytest.mark.parametrize("share", [0.001, 0.05, 0.5, 0.9])
def test_each_element_is_dropped_as_often_as_it_should(share: float) -> None:
    torch.manual_seed(0)
    x, rounds = torch.ones(40, 25), 400
    dropped = torch.stack([(without(x, drop(x, share)) == 0).float() for _ in range(rounds)]).view(rounds, -1)
    deviation = (share * (1 - share)) ** 0.5
    assert abs(float(dropped.mean()) - share) <= 5 * deviation / dropped.numel() ** 0.5
    if share * rounds >= 20:  # enough to be nearly normal: of 1000 places, the first and the last too, none is far off
        assert float((dropped.mean(0) - share).abs().max()) <= 5.5 * deviation / rounds**0.5
    neighbours = (dropped[:, 1:] * dropped[:, :-1]).mean()  # independent: share squared of them are both dropped
    assert abs(float(neighbours) - share**2) <= 6 * share / dropped.numel() ** 0.5


def test_the_same_random_state_drops_the_same() -> None:
    x = torch.randn(30, 20)
    torch.manual_seed(1)
    once = drop(x, 0.3)
    torch.manual_seed(1)
    assert torch.equal(drop(x, 0.3), once)
    assert not torch.equal(drop(x, 0.3), once)


def test_a_mask_and_indices_mean_the_same() -> None:
    x = torch.randn(3, 4)
    mask = torch.zeros(12, dtype=torch.bool)
    mask[[1, 7]] = True
    expected = x.masked_fill(mask.view(3, 4), 0)
    assert torch.equal(without(x, mask.view(3, 4)), expected)
    assert torch.equal(without(x, torch.tensor([1, 7, 12, 12])), expected)
    assert without(x, None) is x


def test_next_to_nothing_can_be_dropped_from() -> None:
    for shape in ((0, 4), (1, 1)):
        assert without(torch.ones(shape), drop(torch.ones(shape), 0.5)).shape == shape
