"""KTO: the paper's formula in float64, its estimate of how far a model has gone, and runs that resume to the bit."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_folder import save_tiny_chat_model
from training_runs import gradients, run_of, timeless, write_sums

import pronk
from pronk import checkpoint, tokenizer
from pronk.checkpoint.adapter import LoraConfig
from pronk.engine.batch import Batch
from pronk.engine.batch import Run as Rows
from pronk.errors import BadFile, BadRequest
from pronk.torch_engine.backend import load_module
from pronk.torch_engine.batch import TorchBatch
from pronk.torch_engine.model import Llama
from pronk.train import lora, optimizers
from pronk.train.data.batches import Batches
from pronk.train.data.containers import BadRecord
from pronk.train.data.examples import Encoder, Example, Judged, content
from pronk.train.data.records import parse
from pronk.train.distributed import Group
from pronk.train.loop import Loop
from pronk.train.objectives.kto import KTO, crossed, losses, others
from pronk.train.schedule import Schedule
from pronk.train.settings import Settings

CPU = torch.device("cpu")
LORA = LoraConfig(rank=4, alpha=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def judged() -> list[Judged]:
    draw = np.random.default_rng(0)

    def example(prompt: int, answer: int) -> Example:
        ids = draw.integers(3, 259, prompt + answer).astype(np.int32)
        return Example(ids, np.arange(len(ids)) >= prompt)

    sizes = [(4, 3), (9, 1), (2, 7), (14, 4), (6, 6), (3, 2), (8, 5), (5, 9)]
    return [Judged(example(*size), number % 3 != 1) for number, size in enumerate(sizes)]


def load(folder: Path, config: LoraConfig | None = LORA, shift: float = 0.05) -> Llama:
    model = load_module(checkpoint.open(folder))
    if config:
        torch.manual_seed(1)
        lora.add(model, config)
        with torch.no_grad():
            for _, layer in lora.layers(model):
                layer.lora_B.normal_(0, shift)
    return model


def make(
    model: Llama, examples: list[Judged], objective: KTO, size: int = 2, accumulate: int = 1, steps: int = 4
) -> Loop:
    batches = Batches([len(one) for one in examples], size, None, seed=3)
    optimizer = optimizers.make(model, "adamw", 3e-3, 0.0)
    loop = Loop(
        model, examples, batches, optimizer, Schedule(3e-3, steps, 1), objective=objective, accumulate=accumulate
    )
    loop.prepare(examples)
    return loop


# -- the loss --


@pytest.mark.parametrize("settings", [KTO(), KTO(beta=0.5, desirable_weight=1.5, undesirable_weight=0.5)])
def test_the_losses_are_the_paper_s(settings: KTO) -> None:
    """Equation (7), with lambda_D and lambda_U, of which v is subtracted (8)."""
    ratios, good, z = np.array([0.5, -3.0, 12.0, -0.25]), np.array([True, True, False, False]), 0.75
    h = settings.beta * np.where(good, ratios - z, z - ratios)
    expected = np.where(good, settings.desirable_weight, settings.undesirable_weight) * (1 - 1 / (1 + np.exp(-h)))
    found = losses(torch.from_numpy(ratios), torch.from_numpy(good), z, settings)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)


def likelihood(model: Llama, example: Example) -> torch.Tensor:
    batch = Batch.of([Rows(example.ids.tolist(), logits="all")])
    logits = model(TorchBatch.of(batch, CPU, None)).log_softmax(-1)
    return torch.stack([logits[at - 1, int(example.ids[at])] for at in np.flatnonzero(example.loss_mask)]).sum()


@pytest.mark.parametrize("config", [LORA, None], ids=["lora", "full"])
def test_loss_and_gradients_are_those_of_a_plain_float64_version(
    folder: Path, judged: list[Judged], config: LoraConfig | None
) -> None:
    """Each text alone, whole logits, a second model for reference; z of answers moved on by one prompt."""
    objective = KTO(beta=0.3, desirable_weight=1.25)
    model, exact, second = load(folder, config), load(folder, config), load(folder, None).double()
    loop = make(model, judged, objective, size=8)
    if config is None:
        for module in (model, exact):
            draw = torch.Generator().manual_seed(2)
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=0.02)
    exact = exact.double()
    moved = [crossed(one, judged[at - 1], max(map(len, judged))) for at, one in enumerate(judged)]
    with torch.no_grad():
        z = torch.stack([likelihood(exact, one) - likelihood(second, one) for one in moved]).mean().clamp(min=0)
    total = torch.zeros((), dtype=torch.float64)
    for one in judged:
        with torch.no_grad():
            before = likelihood(second, one.example)
        h = 0.3 * (likelihood(exact, one.example) - before - z)
        total = total + (1.25 * (1 - torch.sigmoid(h)) if one.good else 1 - torch.sigmoid(-h))
    (total / len(judged)).backward()
    found = gradients(loop)
    assert objective.elsewhere.estimate == pytest.approx(float(z), rel=1e-4, abs=1e-5)
    assert loop.position.losses == [pytest.approx(float(total.detach()) / len(judged), rel=1e-5)]
    named = dict(exact.named_parameters())
    for name, grad in found.items():
        scale = float(named[name].grad.abs().max())
        assert scale > 0
        torch.testing.assert_close(grad.double(), named[name].grad, rtol=1e-4, atol=1e-4 * scale)


@pytest.mark.parametrize("ways", [{"size": 1, "accumulate": 8}, {"size": 3, "accumulate": 3}])
def test_however_examples_are_dealt_out(folder: Path, judged: list[Judged], ways: dict[str, Any]) -> None:
    """The estimate is one for all of a step."""
    whole, dealt = make(load(folder), judged, KTO(), size=8), make(load(folder), judged, KTO(), **ways)
    whole.objective.elsewhere.estimate = dealt.objective.elsewhere.estimate = 99.0  # type: ignore[attr-defined]
    expected, found = gradients(whole), gradients(dealt)
    assert dealt.position.losses == [pytest.approx(whole.position.losses[0], abs=1e-6)]
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-4 * float(grad.abs().max()))


def test_an_answer_to_another_prompt() -> None:
    def example(ids: list[int], first: int) -> Example:
        return Example(np.array(ids, np.int32), np.arange(len(ids)) >= first)

    one, other = Judged(example([1, 2, 3, 4], 2), True), Judged(example([5, 6, 7, 8, 9], 3), False)
    found = crossed(one, other, 9)
    assert (found.ids.tolist(), found.loss_mask.tolist()) == ([1, 2, 8, 9], [False, False, True, True])
    assert crossed(one, other, 3).ids.tolist() == [1, 2, 8]
    cut = crossed(other, one, 3)
    assert (cut.ids.tolist(), cut.targets) == ([6, 7, 3], 1)


def test_the_other_answer_is_never_to_the_same_prompt() -> None:
    """Pairs become a good and a bad answer side by side, and a prompt often has several answers in a row."""

    def example(prompt: int) -> Judged:
        return Judged(Example(np.array([prompt, 3, 4], np.int32), np.arange(3) >= 1), True)

    examples = [example(prompt) for prompt in (7, 7, 8, 8, 8, 9, 7)]
    found = [examples.index(other) for other in others(examples)]
    assert found == [5, 5, 1, 1, 1, 4, 5]
    alike = [example(7) for _ in range(3)]
    assert [alike.index(other) for other in others(alike)] == [2, 0, 1]
    assert others(alike[:1]) == alike[:1]


def test_the_estimate_has_no_dropout_and_is_not_below_zero(folder: Path, judged: list[Judged]) -> None:
    model, objective = load(folder, replace(LORA, dropout=0.5)).train(), KTO()
    make(model, judged, objective)
    found = set()
    for _ in range(2):
        objective.begin(model, [judged[:4], judged[4:]], Group())
        found.add(objective.elsewhere.estimate)
    assert len(found) == 1
    assert model.training
    objective.begin(model, [judged[:4], judged[4:]], Group(), [True, False])
    first = objective.elsewhere.estimate
    objective.begin(model, [judged[:4]], Group())
    assert first == objective.elsewhere.estimate
    fresh = make(load_module(checkpoint.open(folder)), judged, objective := KTO())
    objective.begin(fresh.model, [judged], Group())
    assert objective.elsewhere.estimate == pytest.approx(0, abs=1e-5)  # alone and in a batch: float32's rounding


@pytest.mark.parametrize("config", [LORA, None], ids=["lora", "full"])
def test_it_learns_what_is_good(folder: Path, judged: list[Judged], config: LoraConfig | None) -> None:
    model = load_module(checkpoint.open(folder))
    if config:
        lora.add(model, config)
    loop = make(model, judged, KTO(beta=0.5), size=4, steps=14)
    first = loop.evaluate(judged)
    while not loop.done:
        last = loop.step()
    then = loop.evaluate(judged)
    assert first.loss == pytest.approx(0.5, abs=1e-5)  # of indifference
    assert then.loss < 0.35
    assert then.seen["rewards/signed"] > 0.5
    assert then.seen["rewards/accuracies"] > 0.8
    assert last.seen.keys() == then.seen.keys() == {"rewards/signed", "rewards/accuracies", "logps", "kl"}


# -- records --


def encoder(folder: Path, **options: Any) -> Encoder:
    source = checkpoint.open(folder).tokenizer
    assert source
    return Encoder(tokenizer.load(source), 200, **options)


def test_records_of_three_kinds(folder: Path) -> None:
    own = encoder(folder)
    kinds = KTO.kinds
    (text,) = KTO().encode(parse({"prompt": "2+2=", "completion": "4", "label": True}, "", kinds), own)
    assert text.good
    talk = {"prompt": [{"role": "user", "content": "2+2?"}], "completion": [{"role": "assistant", "content": "5"}]}
    (said,) = KTO().encode(parse({**talk, "label": "False"}, "", kinds), own)
    assert not said.good
    assert own.through
    both = KTO().encode(parse({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, "", kinds), own)
    assert [one.good for one in both] == [True, False]
    assert both[0].example.ids.tolist() == text.example.ids.tolist()
    assert content(both[0]) == content(text) != content(Judged(text.example, False))


@pytest.mark.parametrize("label", ["good", 2, None, [], 0.5])
def test_a_label_that_is_none(label: Any) -> None:
    with pytest.raises(BadRecord, match="label must be true or false, not"):
        parse({"prompt": "a", "completion": "b", "label": label}, "", KTO.kinds)


def test_each_verb_names_the_other(folder: Path, tmp_path: Path) -> None:
    ours, plain, pairs = (tmp_path / f"{name}.jsonl" for name in ("ours", "plain", "pairs"))
    ours.write_text('{"prompt": "a", "completion": "b", "label": true}\n')
    plain.write_text('{"prompt": "a", "completion": "b"}\n')
    pairs.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    for verb in (pronk.finetune, pronk.dpo, pronk.reward):
        with pytest.raises(
            BadFile, match=r"line 1: prompt\+completion\+label is what pronk kto learns from; here it is"
        ):
            _ = verb(folder, ours).data  # type: ignore[operator]
    with pytest.raises(BadFile, match=r"prompt\+completion is what pronk finetune learns from; here it is .*label"):
        _ = pronk.kto(folder, plain).data
    with pytest.raises(BadFile, match=r"is what pronk dpo, kto and reward learn from"):
        _ = pronk.finetune(folder, pairs).data
    assert len(pronk.finetune(folder, ours, fields={"label": ""}).data.train) == 1


# -- runs --


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = write_sums(tmp_path / "sums.jsonl", lambda a, b: {"completion": f" {a + b}."})
    records = [json.loads(line) for line in path.read_text().splitlines()]
    wrong = [{**one, "completion": " I won't say.", "label": False} for one in records[::2]]
    path.write_text("".join(json.dumps(one) + "\n" for one in [*({**one, "label": True} for one in records), *wrong]))
    return path


@pytest.mark.parametrize("config", [replace(LORA, dropout=0.2), None], ids=["lora", "full"])
def test_resumed_is_as_if_never_stopped(folder: Path, data: Path, tmp_path: Path, config: LoraConfig | None) -> None:
    chosen = Settings(
        str(folder), str(data), lora=config, max_steps=6, batch_size=2, accumulate=2, lr=1e-2 if config else 1e-3,
        save_every=3, eval_every=3, objective=KTO(undesirable_weight=2.0),
    )  # fmt: skip
    assert run_of(chosen, tmp_path / "whole").train()
    left = iter([False, False, False, False, True])
    assert not run_of(chosen, tmp_path / "parts").train(stop=lambda: next(left))
    again = run_of(chosen, tmp_path / "parts")
    torch.manual_seed(77)
    again.resume()
    assert again.train()
    assert timeless(tmp_path / "parts") == timeless(tmp_path / "whole")
    if config is None:
        assert any(line.get("kl") for line in timeless(tmp_path / "whole"))
    with pytest.raises(BadRequest, match=r"with undesirable_weight=2\.0, and now it is 1\.0"):
        run_of(replace(chosen, objective=KTO()), tmp_path / "parts").resume()


def test_a_run_from_python(folder: Path, data: Path, tmp_path: Path) -> None:
    run = pronk.kto(folder, data, tmp_path / "out", max_steps=2, batch_size=2, accumulate=2, samples=1, device="cpu")
    lines = [line for line in run if "loss" in line]
    assert {"kl", "rewards/accuracies"} < lines[0].keys()
    assert run.settings.lr == 5e-5
    assert run.result.samples
    assert "kto" in (tmp_path / "out" / "README.md").read_text()
    assert pronk.kto(folder, data, batch_size=2, device="cpu").plan().total > 0


def test_answers_to_one_prompt_are_held_out_together(folder: Path, tmp_path: Path) -> None:
    """Of 20 pairs both answers were drawn for themselves: each held-out one had its prompt among those trained on."""
    pairs = [{"prompt": f"{n}?", "chosen": " yes", "rejected": " no"} for n in range(20)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    chosen = Settings(str(folder), str(tmp_path / "pairs.jsonl"), objective=KTO(), lora=LORA, eval_share=0.2)
    data = run_of(chosen, tmp_path / "run").data

    def prompts(part: Any) -> list[bytes]:
        return [one.example.ids[: int(one.example.loss_mask.argmax())].tobytes() for one in part]

    assert (len(data.train), len(data.held_out)) == (32, 8)
    assert not {*prompts(data.train)} & {*prompts(data.held_out)}


def test_settings_out_of_range() -> None:
    for change in ({"beta": 0.0}, {"desirable_weight": -1.0}, {"undesirable_weight": float("nan")}):
        with pytest.raises(BadRequest, match="must be from"):
            KTO(**change)
    with pytest.raises(BadRequest, match="are both 0: nothing would be learned"):
        KTO(desirable_weight=0.0, undesirable_weight=0.0)


KILLS = [("calls", 4_000), ("writes", 20), ("calls", 60_000), ("writes", 9)]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("verb", ["kto", "dpo", "finetune"])
def test_killed_it_comes_to_the_same_bytes(folder: Path, data: Path, tmp_path: Path, verb: str) -> None:
    """kill -9, between calls of a step and while files are written: with what draws random numbers, DoRA's and both
    objectives' settings."""
    options: dict[str, Any] = {
        "max_steps": 8, "batch_size": 2, "accumulate": 2, "save_every": 2, "eval_every": 4, "samples": 0,
        "device": "cpu", "threads": 1, "dora": True, "rslora": True, "lora_plus_ratio": 4.0, "lora_dropout": 0.1,
        "neftune_alpha": 5.0, "lora_rank": 2,
    }  # fmt: skip
    source = data
    if verb == "dpo":
        options["loss_type"] = "orpo"
        source = write_sums(tmp_path / "pairs.jsonl", lambda a, b: {"chosen": f" {a + b}.", "rejected": " No."})
    elif verb == "finetune":
        source = write_sums(tmp_path / "plain.jsonl", lambda a, b: {"completion": f" {a + b}."})
    for name, kills in (("whole", []), ("killed", KILLS)):
        asked = {"verb": verb, "model": str(folder), "data": str(source), "options": options, "kills": kills}
        (tmp_path / "given.json").write_text(json.dumps({**asked, "out": str(tmp_path / name)}))
        program = [sys.executable, str(Path(__file__).with_name("killed.py")), str(tmp_path / "given.json")]
        done = subprocess.run(program, capture_output=True, text=True, check=False)
        ends = json.loads(done.stdout)
        assert [end for end, _ in ends] == [-signal.SIGKILL] * len(kills) + [0], done.stderr
    assert timeless(tmp_path / "killed") == timeless(tmp_path / "whole")
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "killed" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
