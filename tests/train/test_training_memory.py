"""Memory foretold without weights, held against what a ledger sees of the same step, and against the process itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from formats import save_huggingface
from tiny import in_memory, random_weights, tiny_config
from torch.utils._python_dispatch import TorchDispatchMode
from training_runs import signalled

from pronk.checkpoint.adapter import LoraConfig
from pronk.checkpoint.tensors import Checkpoint, LazyTensor
from pronk.measure.training import plan, trained
from pronk.measure.worker import Worker
from pronk.train import memory
from pronk.train.data.batches import Batches
from pronk.train.data.examples import Example
from pronk.train.data.sources import Data
from pronk.train.interrupt import held_back
from pronk.train.ledger import KINDS, Ledger
from pronk.train.settings import Settings
from pronk.train.trainer import Trainer

CPU = torch.device("cpu")
CONFIG = tiny_config(
    hidden_size=128, intermediate_size=384, num_hidden_layers=4, vocab_size=500, tie_word_embeddings=True
)
LORA = LoraConfig(rank=8, dropout=0.1)


def examples(count: int = 2, tokens: int = 65) -> list[Example]:
    rng = np.random.default_rng(0)
    learned = np.arange(tokens) > 20
    return [Example(rng.integers(0, 500, tokens).astype(np.int32), learned) for _ in range(count)]


def settings(**changes: Any) -> Settings:
    return Settings("memory", "", **{"lora": None, "max_steps": 9, "accumulate": 2, **changes})


def never_read() -> Checkpoint:
    """A checkpoint whose tensors have shapes and no numbers."""
    opened = in_memory(CONFIG, random_weights(CONFIG))

    def read() -> Any:
        raise AssertionError("a plan reads no weights")

    tensors = {name: LazyTensor(name, of.shape, "F32", of.nbytes, read) for name, of in opened.tensors.items()}
    return replace(opened, tensors=tensors)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"accumulate": 1},
        {"recompute": 1},
        {"precision": "bf16", "recompute": 2},
        {"lora": LORA},
        {"lora": LORA, "precision": "bf16"},
        {"lora": LORA, "quantize": "q4"},
        {"lora": LORA, "quantize": "int8", "recompute": 1},
        {"lora": replace(LORA, dora=True), "lora_plus_ratio": 4.0, "neftune_alpha": 5.0},
        {"lora": replace(LORA, dora=True), "quantize": "q4", "precision": "bf16"},
        {"optimizer": "adamw8bit", "batch_size": 2},
        {"optimizer": "sgd"},
        {"optimizer": "adafactor"},
        {"optimizer": "adafactor", "lora": replace(LORA, dora=True), "precision": "bf16", "accumulate": 1},
        {"optimizer": "muon"},
        {"optimizer": "muon", "lora": LORA, "lora_plus_ratio": 4.0},
    ],
    ids=str,
)
def test_what_is_foretold_is_what_a_ledger_sees_of_the_step(changes: dict[str, Any], tmp_path: Path) -> None:
    chosen, data = settings(**changes), examples()
    foretold = memory.plan(never_read(), chosen, data, CPU)
    run = Trainer(
        in_memory(CONFIG, random_weights(CONFIG)), Data(list(data), [], ["", ""], [], 0, 0, {}), chosen, tmp_path,
        device="cpu",
    )  # fmt: skip
    run.loop.step()  # after which there is an optimizer's state
    with Ledger(run.model, run.loop.optimizer, CONFIG.vocab_size) as seen:
        run.loop.step()
    for kind in KINDS:
        assert foretold.most[kind] == pytest.approx(seen.most[kind], rel=0.02, abs=20_000), kind
    assert sum(foretold.at_peak.values()) == pytest.approx(seen.at_peak.total(), rel=0.02)


def test_the_largest_micro_batch_of_those_that_the_run_sees() -> None:
    every = [Example(np.zeros(n, np.int32), np.ones(n, np.bool_)) for n in range(10, 60)]
    assert [len(one) for one in memory.largest(settings(max_steps=None, epochs=1.0), every)] == [59]
    two = memory.largest(settings(max_steps=1, accumulate=2), every)
    order = Batches([len(one) for one in every]).epoch(0)[:2]
    assert len(two[0]) == max(len(every[i]) for [i] in order) < 59
    pairs = memory.largest(settings(max_steps=None, epochs=40.0, batch_size=2), every)
    assert 110 < sum(map(len, pairs)) <= 58 + 59


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_products_of_examples_of_many_lengths_have_few_shapes(precision: Any, tmp_path: Path) -> None:
    """oneDNN keeps a program for each: a process that trained on 180 lengths held a gigabyte of them."""

    def shapes(lengths: range) -> set[tuple[Any, ...]]:
        data = [one for tokens in lengths for one in examples(1, tokens)]
        chosen = settings(lora=LORA, precision=precision, accumulate=1, max_steps=len(data))
        given = Data(data, [], ["" for _ in data], [], 0, 0, {})
        run = Trainer(in_memory(CONFIG, random_weights(CONFIG)), given, chosen, tmp_path, device="cpu")
        with Products() as products:
            while not run.loop.done:
                run.loop.step()
            run.loop.evaluate(data)
        return products.shapes

    one = shapes(range(97, 98))  # 96 are read, and the last 76 of these learned: 80 with what fills up
    assert len(one) > 10
    assert shapes(range(86, 98)) == one


class Products(TorchDispatchMode):
    """Notes what matrix products are given."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[Any, ...]] = set()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind in str(operation) for kind in ("aten.mm", "aten.addmm", "mkldnn")):
            self.shapes.add((str(operation), *(tuple(x.shape) for x in args if isinstance(x, torch.Tensor))))
        return operation(*args, **(kwargs or {}))


def test_passes_of_different_lengths_leave_holes() -> None:
    chosen = settings(accumulate=1)
    same = memory.plan(never_read(), chosen, examples(3), CPU)
    mixed = memory.plan(never_read(), chosen, [*examples(2), *examples(1, 30)], CPU)
    assert mixed.at_peak == same.at_peak
    passing = same.at_peak["activations"] + same.at_peak["logits"]
    more = (memory.SCRATCH_OF_LENGTHS - memory.SCRATCH) * passing
    assert mixed.scratch - same.scratch == pytest.approx(more, abs=1)


# Of one process each: switches that change what there is at the peak.
MEASURED: dict[str, dict[str, Any]] = {
    "full": {"lora": None, "settings": {"accumulate": 1}},
    "LoRA, recomputed": {"lora": {"rank": 16}, "settings": {"recompute": 1, "quantize": "f32"}},
    "LoRA over q4, bf16": {"lora": {"rank": 16}, "settings": {"precision": "bf16", "quantize": "q4", "accumulate": 1}},
    "full, 8 bits, accumulated": {"lora": None, "settings": {"accumulate": 2, "optimizer": "adamw8bit"}},
    "full, Adafactor": {"lora": None, "settings": {"accumulate": 1, "optimizer": "adafactor"}},
    "full, Muon": {"lora": None, "settings": {"accumulate": 2, "optimizer": "muon"}},
}


@pytest.mark.timeout(1200)  # 16-bit products take minutes on processors that have none
@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURED)
def test_the_peak_of_a_process_is_within_15_percent_of_what_was_foretold(name: str, tmp_path: Path) -> None:
    """With 29 million parameters, so that most of it is not the process's own.

    Which holes the C library leaves between tensors depends on the addresses that the system deals out: of 33 processes
    the steps with AdamW in 8 bits peaked at 916 to 1031 MB, half of them below 935, and three without random addresses
    at 946 each; 886 are foretold.
    """
    config = tiny_config(
        hidden_size=512, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4,
        head_dim=64, vocab_size=16_000, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    model = tmp_path / "model"
    save_huggingface(model, config, random_weights(config))
    ids = np.random.default_rng(1).integers(3, 16_000, 513).tolist()
    lora = MEASURED[name]["lora"]
    chosen = Settings(
        str(model), "", lora=LoraConfig(**lora) if lora else None, lr=1e-5, max_steps=9, **MEASURED[name]["settings"]
    )
    example = Example(np.array(ids, np.int32), np.arange(513) > 0)
    training = {"settings": chosen, "examples": [example], "device": "cpu"}
    with closing(Worker(name)) as worker:
        foretold = worker.call(plan, **training)
        measured = worker.call(trained, **training, threads=1, count=2, account=False)
    assert foretold["total"] == pytest.approx(measured["steps"]["peak_bytes"], rel=0.15)


class Ended(BaseException):
    pass


@pytest.fixture
def handled() -> Iterator[None]:
    def end(number: int, frame: object) -> None:
        raise Ended

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handled")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_the_plan(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """What it raised came up in what torch's C++ calls back, and aborted the process: \"terminate called after throwing
    an instance of 'python_error'\"."""
    left, real = [], Ledger.__exit__

    def leave(ledger: Ledger, *error: Any) -> None:
        left.append(error[0])
        real(ledger, *error)

    monkeypatch.setattr(Ledger, "__exit__", leave)
    handler = signal.getsignal(number)
    with signalled(number, at=0), pytest.raises(Ended):
        memory.plan(never_read(), settings(), examples(), CPU)
    assert left == [None]  # the rehearsal went on to its end
    assert signal.getsignal(number) is handler


@pytest.mark.usefixtures("handled")
def test_a_second_signal_does_not_wait_for_the_plan() -> None:
    def rehearse() -> None:
        with held_back():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            pytest.fail("it waited")

    with pytest.raises(Ended):
        rehearse()
