"""Which passes are captured, replayed and begun ahead: without a GPU, over graphs that note what they were given."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from weakref import ref

import pytest
import torch
from tiny import in_memory, random_weights, tiny_config

from pronk.engine.batch import Batch, Run, Wants
from pronk.torch_engine.backend import load_model
from pronk.torch_engine.gpu import graphs
from pronk.torch_engine.gpu.ahead import PATIENCE
from pronk.torch_engine.gpu.graphs import Found, Graphs
from pronk.torch_engine.gpu.step import Step
from pronk.torch_engine.kv import TorchKV
from pronk.torch_engine.predictions import Likeliest

CPU = torch.device("cpu")
BLOCK, VOCABULARY = 64, 500


class Graph:
    """What a captured pass is to the others: its tokens go in, and each text's likeliest token is the one after its."""

    def __init__(self, rows: int) -> None:
        self.tokens = torch.zeros(rows, dtype=torch.int32)
        self.likeliest = torch.full((2, rows), -777)  # nothing was computed yet
        self.replays: list[list[int]] = []

    def replay(self) -> None:
        self.replays.append(self.tokens.tolist())
        self.likeliest = torch.stack((self.tokens.long() + 1, torch.ones(len(self.tokens), dtype=torch.int64)))


class Told(Graphs):
    """Without a device: what is captured, given and replayed is noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "Event", lambda: None)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        config = tiny_config(vocab_size=VOCABULARY, max_position_embeddings=8192)
        model = load_model(in_memory(config, random_weights(config)), CPU, torch.float32).requires_grad_(False)
        super().__init__(Step(model), model)
        self.captured: list[Graph] = []
        self.eager = 0
        self.config = config

    def _capture(self, batch: Batch, kv: TorchKV, size: Any) -> Any:
        self.captured.append(Graph(size.room.tokens))
        return self.captured[-1]

    def _give(self, captured: Any, batch: Batch, kv: TorchKV) -> None:
        captured.tokens[: len(batch.token_ids)] = torch.from_numpy(batch.token_ids)
        captured.tokens[len(batch.token_ids) :] = int(batch.token_ids[-1])

    def _replayed(self, captured: Any, batch: Batch) -> Found:
        captured.replay()
        self._latest = ref(captured)
        return Found(torch.zeros(len(batch.logits_rows), 1), Likeliest(captured.likeliest, len(batch.logits_rows)))

    def _computed(self, batch: Any, kv: TorchKV) -> Any:
        self.eager += 1
        return torch.zeros(0, 1), torch.zeros(2, 0, dtype=torch.int64)

    @property
    def replays(self) -> int:
        return sum(len(graph.replays) for graph in self.captured)


def cache(told: Told, blocks: int = 40) -> TorchKV:
    return TorchKV(told.config, blocks, BLOCK, torch.float32, CPU)


def step(tokens: list[int], at: int) -> Batch:
    return Batch.of(Run([token], at, [n]) for n, token in enumerate(tokens))


def prompt(length: int, start: int = 0, logits: Wants = "last") -> Batch:
    return Batch.of([Run([7] * length, start, range(40), logits)])


def written(told: Told, kv: TorchKV, tokens: list[int], at: int, passes: int) -> list[int]:
    """Greedily; the tokens that the last pass gave."""
    for number in range(passes):
        tokens = [token for token, _ in told(step(tokens, at + number), kv).likeliest.read()]
    return tokens


@pytest.mark.parametrize("texts", [1, 3])
def test_the_next_pass_is_replayed_before_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, texts: int) -> None:
    """Of three texts in a graph of four, the fourth is a copy of the third."""
    told = Told(monkeypatch)
    kv = cache(told)
    assert written(told, kv, [10 * n for n in range(texts)], 0, PATIENCE) == [10 * n + PATIENCE for n in range(texts)]
    assert told.replays == PATIENCE
    assert (
        written(told, kv, [10 * n + PATIENCE for n in range(texts)], PATIENCE, 6)[-1] == 10 * (texts - 1) + PATIENCE + 6
    )
    assert told.replays == PATIENCE + 6 + 1  # one that nobody has asked for yet
    (graph,) = told.captured
    rows = [10 * n for n in range(texts)] + [10 * (texts - 1)] * (len(graph.tokens) - texts)
    assert graph.replays == [[token + number for token in rows] for number in range(PATIENCE + 7)]


def test_what_another_graph_holds_is_not_taken_for_the_last_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache grew while a pass was on its way: its graphs are others now, which have computed nothing yet."""
    told = Told(monkeypatch)
    kv = cache(told)
    tokens = written(told, kv, [5], 0, PATIENCE + 2)
    kv.resize(50)
    assert written(told, kv, tokens, PATIENCE + 2, 3) == [tokens[0] + 3]
    _, after = told.captured
    assert all(0 <= token < VOCABULARY for tokens in after.replays for token in tokens)
    assert after.replays[0] == tokens


def test_a_pass_of_the_plain_module_between_makes_what_was_begun_void(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch)
    kv = cache(told)
    tokens = written(told, kv, [5], 0, PATIENCE + 2)
    replays = told.replays
    told.forget()
    told(step(tokens, PATIENCE + 2), kv)
    assert told.replays == replays + 1


def test_memory_that_runs_out_for_the_next_pass_does_not_fail_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch)
    kv = cache(told)
    tokens = written(told, kv, [5], 0, PATIENCE)

    def none_left(*given: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(told, "_begin", none_left)
    assert written(told, kv, tokens, PATIENCE, 3) == [tokens[0] + 3]


def test_a_prompt_is_captured_when_its_length_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch)
    kv = cache(told)
    for batch, eager, captured, replays in [
        (prompt(100), 1, 0, 0),
        (prompt(90), 2, 0, 0),
        (prompt(100), 2, 1, 1),
        (prompt(100, logits="none"), 3, 1, 1),  # another pass: it ends before the head
        (prompt(100, 300), 4, 1, 1),  # as far as its keys reach, another
        (prompt(100), 4, 1, 2),
        (prompt(100, logits="all"), 5, 1, 2),
        (prompt(100, logits="all"), 6, 1, 2),
        (prompt(graphs.LONGEST + 1), 7, 1, 2),
        (prompt(graphs.LONGEST + 1), 8, 1, 2),
        (prompt(1, logits="none"), 9, 1, 2),
        (prompt(1, logits="none"), 10, 1, 2),
    ]:
        told(batch, kv)
        assert (told.eager, len(told.captured), told.replays) == (eager, captured, replays)


def test_many_lengths_do_not_drive_out_the_graphs_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch)
    kv = cache(told)
    told(step([1], 0), kv)
    for _ in range(3):
        for length in range(2, 4 + graphs._PROMPTS):
            told(prompt(length), kv)
    assert len(told.captured) == 1  # each was forgotten before it came again
    told(step([1], 0), kv)
    assert (len(told.captured), told.replays) == (1, 2)


def test_graphs_go_with_their_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch)
    kv = cache(told)
    told(step([1], 0), kv)
    assert len(told._kept) == 1
    del kv
    assert not len(told._kept)
