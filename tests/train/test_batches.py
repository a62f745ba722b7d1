"""Examples put together: each once an epoch, in an order that repeats; packed, nothing leaks from one to the next."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import random_weights, tiny_config

from pronk.errors import BadRequest
from pronk.torch_engine.batch import TorchBatch
from pronk.torch_engine.model import Llama
from pronk.train.data.batches import Batches, MicroBatch, filled, of_groups
from pronk.train.data.examples import Example
from pronk.train.objectives.loss import IGNORED
from pronk.train.schedule import Schedule

CPU = torch.device("cpu")


def example(ids: list[int], prompt: int) -> Example:
    return Example(np.array(ids, np.int32), np.arange(len(ids)) >= prompt)


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60),
    size=st.integers(1, 8),
    pack=st.none() | st.integers(50, 120),
    bucket=st.booleans(),
    seed=st.integers(0, 5),
)
def test_every_example_once_an_epoch(lengths: list[int], size: int, pack: int | None, bucket: bool, seed: int) -> None:
    batches = Batches(lengths, size, pack, bucket, seed)
    for number in range(2):
        epoch = batches.epoch(number)
        assert sorted(i for batch in epoch for i in batch) == list(range(len(lengths)))
        assert epoch == batches.epoch(number)
        for batch in epoch:
            assert len(batch) <= size if pack is None else sum(lengths[i] for i in batch) <= pack


def test_epochs_and_seeds_differ_in_order() -> None:
    orders = [Batches([1] * 30, seed=seed).epoch(number) for seed in range(2) for number in range(2)]
    assert all(a != b for n, a in enumerate(orders) for b in orders[:n])


def test_buckets_hold_like_lengths() -> None:
    lengths = list(range(1, 65))
    spread = {
        bucket: np.mean([np.ptp([lengths[i] for i in batch]) for batch in Batches(lengths, 8, None, bucket).epoch(0)])
        for bucket in (False, True)
    }
    assert spread[True] == 7
    assert spread[False] > 30


def test_only_what_is_learned_wants_logits() -> None:
    found = MicroBatch.of([example([5, 6, 7, 8], 2), example([9, 10], 1)], CPU)
    assert found.batch.token_ids.tolist() == [5, 6, 7, 9] + [0] * 12
    assert found.batch.positions.tolist() == [0, 1, 2, *range(13)]
    assert found.batch.logits_rows.tolist() == [1, 2, 3] + [15] * 13
    assert found.targets.tolist() == [7, 8, 10] + [IGNORED] * 13
    assert (found.tokens, found.weight) == (4, 3)


def test_few_numbers_of_rows_and_few_that_only_fill() -> None:
    """Each costs a program in every product, which is kept."""
    rows = {count: filled(count) for count in range(1, 8193)}
    assert all(count <= rows[count] < count + max(16, count / 16) for count in rows)
    assert len(set(rows.values())) < 100
    assert [filled(count) for count in (0, 1, 16, 17, 511, 512, 513, 8192)] == [0, 16, 16, 32, 512, 512, 544, 8192]


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60),
    size=st.integers(1, 4),
    accumulate=st.integers(1, 9),
    number=st.integers(0, 2),
)
def test_passes_have_every_example_and_no_more_tokens_than_the_largest_micro_batch(
    lengths: list[int], size: int, accumulate: int, number: int
) -> None:
    batches = Batches(lengths, size)

    def tokens(batch: list[int]) -> int:
        return sum(lengths[i] for i in batch)

    largest = max(map(tokens, batches.epoch(0)))
    step = batches.epoch(number)[:accumulate]
    passes = batches.passes(step)
    assert sorted(i for one in passes for i in one) == sorted(i for one in step for i in one)
    assert max(map(tokens, passes)) <= max(largest, *map(tokens, step), 0)
    assert all(tokens(a) + tokens(b) > largest for n, a in enumerate(passes) for b in passes[:n])


def test_passes_are_what_accumulation_left_free() -> None:
    assert Batches([5, 90, 30, 40, 60]).passes([[0], [2], [3], [4]]) == [[4, 2], [3, 0]]
    assert Batches([40] * 8).passes([[0], [1], [2]]) == [[0], [1], [2]]


def test_passes_of_a_step_of_thousands_take_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths are added up once for each micro-batch, not once for each pass that it might go into."""
    added = []
    batches = Batches([40 + n % 50 for n in range(300)])
    tokens = Batches._tokens
    monkeypatch.setattr(Batches, "_tokens", lambda self, batch: added.append(1) or tokens(self, batch))
    batches.passes(batches.epoch(1))
    assert len(added) <= 3 * 300


def test_packed_together_each_is_as_if_alone() -> None:
    config = tiny_config()
    model = Llama(config)
    state = {name: torch.from_numpy(np.array(array, np.float32)) for name, array in random_weights(config).items()}
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    texts = [example([3, 9, 4, 1, 5], 1), example([7, 7, 2], 1), example([8, 1, 6, 6], 2)]
    together = logits(model, texts)
    alone = torch.cat([logits(model, [text]) for text in texts])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)
    # The inverse: one long text is not the same as three.
    joined = example([int(i) for text in texts for i in text.ids], 1)
    rows = np.concatenate([np.append(text.loss_mask[1:], False) for text in texts])[:-1]
    assert not torch.allclose(logits(model, [joined])[torch.from_numpy(rows)], alone, atol=1e-2)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_group_s_prompt_is_read_once_and_is_as_if_before_each_answer(kind: torch.dtype) -> None:
    """Logits and gradients; answers of one token have nothing to be read but the prompt."""
    model = Llama(config := tiny_config())
    state = {name: torch.from_numpy(np.array(array, np.float32)) for name, array in random_weights(config).items()}
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    groups = [([3, 9, 4], [[1, 5, 2], [], [8]]), ([7], [[7, 2], [6, 6, 1, 4]]), ([5, 5], [[], [9]])]
    near = {torch.float32: 1e-5, torch.bfloat16: 0.05}[kind]

    def gone_through(batch: TorchBatch, rows: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model.zero_grad()
        with torch.autocast("cpu", kind, enabled=kind != torch.float32):
            found = model(batch)[:rows].float()
        (found.square() * torch.linspace(0.5, 2.0, rows)[:, None]).mean().backward()
        return found.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    texts = [example([*prompt, *answer, 0], len(prompt)) for prompt, answers in groups for answer in answers]
    alone = MicroBatch.of(texts, CPU)
    together = of_groups(groups, CPU)
    read = sum(len(prompt) + sum(map(len, answers)) for prompt, answers in groups)
    assert (len(together.token_ids), len(together.logits_rows)) == (filled(read), filled(alone.weight))
    expected, gradients = gone_through(alone.batch, alone.weight)
    found, own = gone_through(together, alone.weight)
    torch.testing.assert_close(found, expected, rtol=near, atol=near)
    for name, gradient in gradients.items():
        assert (own[name] - gradient).norm() < near * gradient.norm(), name
    # The inverse: answers that do not look at their prompt are others.
    blind = replace(together, runs=tuple(replace(run, start=0, prefix=None) for run in together.runs))
    assert not torch.allclose(gone_through(blind, alone.weight)[0], expected, atol=0.1)


def logits(model: Llama, texts: list[Example]) -> torch.Tensor:
    """Of what is learned."""
    micro = MicroBatch.of(texts, CPU)
    return model(micro.batch)[: micro.weight]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"lengths": []}, "no examples"),
        ({"lengths": [1], "size": 0}, "batch size"),
        ({"lengths": [1, 90], "pack": 80}, "an example has 90 tokens and does not fit into 80"),
    ],
)
def test_what_cannot_be_put_together(options: dict[str, object], problem: str) -> None:
    with pytest.raises(BadRequest, match=problem):
        Batches(**options)  # type: ignore[arg-type]


def test_schedules() -> None:
    cosine = Schedule(1.0, 100, 10, "cosine", 0.1)
    assert [round(cosine.at(step), 3) for step in (0, 4, 9, 10, 55, 100, 500)] == [0.1, 0.5, 1.0, 1.0, 0.55, 0.1, 0.1]
    linear = Schedule(2.0, 10, 0, "linear")
    assert [linear.at(step) for step in (0, 5, 10)] == [2.0, 1.0, 0.0]
    assert {Schedule(3.0, 10, 0, "constant").at(step) for step in range(20)} == {3.0}
    assert Schedule(1.0, 5, 5).at(4) == 1.0


def test_the_cosine_is_that_of_transformers() -> None:
    optimization = pytest.importorskip("transformers").optimization
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=3e-4)
    theirs = optimization.get_cosine_schedule_with_warmup(optimizer, 5, 50)
    ours = Schedule(3e-4, 50, 5)
    for step in range(5, 50):  # theirs begins its warm-up with a rate of zero
        assert ours.at(step) == pytest.approx(theirs.lr_lambdas[0](step) * 3e-4)


@pytest.mark.parametrize(
    "options",
    [{"peak": 0.0, "steps": 1}, {"peak": 1.0, "steps": 0}, {"peak": 1.0, "steps": 5, "warmup": 6},
     {"peak": 1.0, "steps": 5, "shape": "sine"}, {"peak": 1.0, "steps": 5, "floor": 2.0}],
)  # fmt: skip
def test_schedules_that_are_none(options: dict[str, object]) -> None:
    with pytest.raises(BadRequest):
        Schedule(**options)  # type: ignore[arg-type]
