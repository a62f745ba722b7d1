"""Preference tuning: TRL's losses, plain float64 gradients, a reference that stays where it was, and what it learns."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_folder import save_tiny_chat_model
from training_runs import gradients, run_of, timeless, write_sums

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
from pronk.train.data.examples import Encoder, Example, Pair
from pronk.train.data.records import parse
from pronk.train.loop import Loop
from pronk.train.objectives.dpo import DPO, losses
from pronk.train.objectives.sft import SFT
from pronk.train.schedule import Schedule
from pronk.train.settings import Settings

CPU = torch.device("cpu")
LORA = LoraConfig(rank=4, alpha=8, dropout=0.2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    """Eight, of unequal lengths; the first tokens of both answers' texts are the same prompt."""
    draw = np.random.default_rng(0)

    def example(prompt: np.ndarray, length: int) -> Example:
        ids = np.concatenate([prompt, draw.integers(3, 259, length)]).astype(np.int32)
        return Example(ids, np.arange(len(ids)) >= len(prompt))

    prompts = [draw.integers(3, 259, n) for n in (4, 9, 2, 14, 6, 3, 8, 5)]
    return [Pair(example(p, int(draw.integers(1, 12))), example(p, int(draw.integers(1, 12)))) for p in prompts]


def load(folder: Path, config: LoraConfig | None = None) -> Llama:
    """With LoRA where it is asked for, of matrices that both are away from zero."""
    model = load_module(checkpoint.open(folder))
    if config:
        torch.manual_seed(1)
        lora.add(model, config)
        with torch.no_grad():
            for _, layer in lora.layers(model):
                layer.lora_B.normal_(0, 0.05)
    return model


# -- the loss --

# log p and log p_ref of chosen and rejected answers, nats, and their tokens.
POLICY = [[-12.5, -14.0], [-30.25, -28.0], [-7.0, -7.0], [-101.0, -55.5]]
REFERENCE = [[-13.0, -13.5], [-29.0, -30.5], [-7.5, -7.25], [-90.0, -80.0]]
TOKENS = [10, 12, 21, 20, 6, 7, 80, 41]


# What TRL 1.16's DPOTrainer makes of these numbers, beta 0.1.
TRL = {
    "sigmoid": [0.6443966600735709, 0.8981232641398401, 0.6807253035255248, 3.578319821093369],
    "hinge": [0.9, 1.375, 0.975, 4.55],
    "ipo": [24.09173611111111, 26.879287131519273, 24.52607709750567, 32.89092439396193],
}


def plain(settings: DPO) -> np.ndarray:
    """The formulas, in float64."""
    policy, reference, tokens = np.array(POLICY), np.array(REFERENCE), np.array(TOKENS).reshape(-1, 2)
    if settings.loss_type == "ipo":
        ratios = (policy - reference) / tokens
        return (ratios[:, 0] - ratios[:, 1] - 0.5 / settings.beta) ** 2
    h = settings.beta * ((policy[:, 0] - policy[:, 1]) - (reference[:, 0] - reference[:, 1]))
    if settings.loss_type in ("simpo", "orpo"):
        means = policy / tokens
        if settings.loss_type == "simpo":
            h = settings.beta * (means[:, 0] - means[:, 1]) - settings.simpo_gamma
        else:
            odds = means - np.log(1 - np.exp(means))
            return -settings.beta * np.log(1 / (1 + np.exp(odds[:, 1] - odds[:, 0])))
    if settings.loss_type == "hinge":
        return np.maximum(0.0, 1 - h)
    likely, flipped = -np.log(1 / (1 + np.exp(-h))), -np.log(1 / (1 + np.exp(h)))
    return (1 - settings.label_smoothing) * likely + settings.label_smoothing * flipped


@pytest.mark.parametrize("beta", [0.1, 0.5])
@pytest.mark.parametrize(
    "chosen",
    [
        DPO(), DPO(label_smoothing=0.2), DPO(loss_type="hinge"), DPO(loss_type="ipo"), DPO(loss_type="simpo"),
        DPO(loss_type="simpo", simpo_gamma=1.5, label_smoothing=0.2), DPO(loss_type="orpo"),
    ],
    ids=["sigmoid", "smoothed", "hinge", "ipo", "simpo", "simpo-smoothed", "orpo"],
)  # fmt: skip
def test_the_losses_are_their_formulas_and_trl_s(chosen: DPO, beta: float) -> None:
    settings = replace(chosen, beta=beta)
    ratios = torch.tensor(POLICY, dtype=torch.float64)
    if settings.refers:
        ratios -= torch.tensor(REFERENCE, dtype=torch.float64)
    found = losses(ratios, TOKENS, settings).numpy()
    np.testing.assert_allclose(found, plain(settings), rtol=1e-12)
    if beta == 0.1 and not settings.label_smoothing and settings.refers:
        np.testing.assert_allclose(found, TRL[settings.loss_type], rtol=1e-12)
    alone = losses(ratios[:1], TOKENS[:2], settings)
    assert float(alone) == pytest.approx(found[0], rel=1e-12)


def in_float64(folder: Path, model: Llama, pairs: list[Pair], settings: DPO) -> torch.Tensor:
    """Mean loss by definition: each answer alone, whole logits, and a second model for reference."""

    def likelihood(module: Llama, example: Example) -> torch.Tensor:
        batch = Batch.of([Rows(example.ids.tolist(), logits="all")])
        logits = module(TorchBatch.of(batch, CPU, None)).log_softmax(-1)
        picked = [logits[at - 1, int(example.ids[at])] for at in np.flatnonzero(example.loss_mask)]
        return torch.stack(picked).sum()

    second = load(folder).double()
    total = torch.zeros((), dtype=torch.float64)
    for pair in pairs:
        with torch.no_grad():
            reference = torch.stack([likelihood(second, pair.chosen), likelihood(second, pair.rejected)])
        policy = torch.stack([likelihood(model, pair.chosen), likelihood(model, pair.rejected)])
        total = total + losses((policy - reference)[None], [pair.chosen.targets, pair.rejected.targets], settings)[0]
    return total / len(pairs)


@pytest.mark.parametrize("chosen", [DPO(beta=0.3), DPO(loss_type="ipo")], ids=["sigmoid", "ipo"])
@pytest.mark.parametrize("config", [None, LoraConfig(rank=4, alpha=8)], ids=["full", "lora"])
def test_loss_and_gradients_are_those_of_a_plain_float64_version(
    folder: Path, pairs: list[Pair], config: LoraConfig | None, chosen: DPO
) -> None:
    model, objective = load(folder, config), replace(chosen)
    exact = load(folder, config)
    if config is None:  # away from the reference, or only half of the loss would be looked at
        objective.reference.ask(model, pairs)
        for module in (model, exact):
            draw = torch.Generator().manual_seed(2)
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=0.02)
    expected = in_float64(folder, exact.double(), pairs, chosen)
    expected.backward()
    cost, seen = objective.loss(model, objective.collate(pairs, CPU))
    (cost / len(pairs)).backward()
    assert cost.item() / len(pairs) == pytest.approx(expected.item(), rel=1e-5)
    assert abs(seen["rewards/margins"]) > 0.01
    named = dict(exact.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None
            scale = float(named[name].grad.abs().max())
            assert scale > 0
            # float32 rounds each of some hundred terms by 2^-24; what cancels between two answers is some times larger
            torch.testing.assert_close(parameter.grad.double(), named[name].grad, rtol=1e-4, atol=1e-4 * scale)


def test_what_is_shown(folder: Path, pairs: list[Pair]) -> None:
    """Sums over pairs, under TRL's names; and before any step nothing is preferred."""
    objective = DPO(beta=0.2)
    model = load(folder, LORA).eval()
    _, seen = objective.loss(model, work := objective.collate(pairs, CPU))
    ratios = np.array([seen["rewards/chosen"], seen["rewards/rejected"]]) / 0.2
    reference = objective.reference.of(model, work.pairs).sum(0).numpy()
    np.testing.assert_allclose([seen["logps/chosen"], seen["logps/rejected"]] - reference, ratios, rtol=1e-3)
    assert seen["rewards/margins"] == pytest.approx(seen["rewards/chosen"] - seen["rewards/rejected"], abs=1e-5)
    each = [objective.loss(model, objective.collate([pair], CPU))[1]["rewards/margins"] for pair in pairs]
    assert seen["rewards/accuracies"] == sum(margin > 0 for margin in each)
    fresh = load_module(checkpoint.open(folder))
    lora.add(fresh, LORA)
    cost, seen = DPO().loss(fresh, objective.collate(pairs[:1], CPU))
    assert cost.item() == pytest.approx(np.log(2))
    assert [seen["rewards/margins"], seen["rewards/accuracies"]] == [0.0, 0.5]


# -- the reference --


def test_the_reference_is_a_second_copy_of_the_model(folder: Path, pairs: list[Pair]) -> None:
    """To the bit: with the adapter switched off, dropout or not, in whatever batch; and kept."""
    copy = DPO().reference
    copy.ask(load(folder), pairs)
    expected = copy.of(load(folder), pairs)
    model = load(folder, LORA).train()
    switched = DPO().reference
    found = torch.cat([switched.of(model, pairs[:5]), switched.of(model, pairs[5:])])
    assert torch.equal(found, expected)
    assert all(layer.enabled for _, layer in lora.layers(model))
    assert model.training
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert torch.equal(switched.of(model, pairs), expected)


def test_an_adapter_left_on_would_be_seen(folder: Path, pairs: list[Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """The inverse."""
    expected = DPO().reference.of(load(folder, LORA), pairs)
    monkeypatch.setattr("pronk.train.objectives.reference.lora.disabled", lambda model: torch.no_grad())
    left_on = DPO().reference.of(load(folder, LORA).eval(), pairs)
    assert float((left_on - expected).abs().max()) > 1e-2


def test_dropout_is_the_policy_s_alone(folder: Path, pairs: list[Pair]) -> None:
    model, objective = load(folder, LORA).train(), DPO()
    work = objective.collate(pairs, CPU)
    before = objective.reference.of(model, pairs)
    torch.manual_seed(3)
    costs = [objective.loss(model, work)[0].item() for _ in range(2)]
    assert costs[0] != costs[1]
    assert torch.equal(objective.reference.of(model, pairs), before)
    model.eval()
    costs = [objective.loss(model, work)[0].item() for _ in range(2)]
    assert costs[0] == costs[1]


def test_of_all_weights_the_reference_is_asked_before_they_change(folder: Path, pairs: list[Pair]) -> None:
    objective, model = DPO(), load(folder)
    told: list[tuple[int, int]] = []
    objective.reference.ask(model, pairs[:7], lambda done, of: told.append((done, of)))
    assert told == [(n, 7) for n in range(7)]
    with pytest.raises(LookupError, match="was not asked of this example before"):
        objective.loss(model, objective.collate(pairs, CPU))


# -- in the loop --


def make(model: Llama, pairs: list[Pair], *, steps: int = 4, rate: float = 1e-3, **options: Any) -> Loop:
    batches = Batches([len(pair) for pair in pairs], options.pop("size", 2), options.pop("pack", None), seed=3)
    optimizer = optimizers.make(model, "adamw", rate, 0.0)
    return Loop(model, pairs, batches, optimizer, Schedule(rate, steps, 1), **options)


@pytest.mark.parametrize("ways", [{"size": 1, "accumulate": 8}, {"size": 3, "accumulate": 3}])
def test_however_pairs_are_dealt_out(folder: Path, pairs: list[Pair], ways: dict[str, Any]) -> None:
    config = LoraConfig(rank=4, alpha=8)
    whole = make(load(folder, config), pairs, size=8, objective=DPO())
    dealt = make(load(folder, config), pairs, **ways, objective=DPO())
    expected, found = gradients(whole), gradients(dealt)
    assert dealt.position.losses == [pytest.approx(whole.position.losses[0], abs=1e-6)]
    assert expected.keys() == found.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-4 * float(grad.abs().max()))


def test_what_is_shown_of_a_step_is_the_mean_over_all_its_pairs(folder: Path, pairs: list[Pair]) -> None:
    shown = [
        make(load(folder, LoraConfig(rank=4)), pairs, **ways, objective=DPO()).step().seen
        for ways in ({"size": 8}, {"size": 3, "accumulate": 3})
    ]
    assert shown[0] == pytest.approx(shown[1], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(
    "chosen",
    [
        DPO(),
        DPO(loss_type="hinge"),
        DPO(loss_type="ipo"),
        DPO(loss_type="simpo", beta=2.0),
        DPO(loss_type="orpo", beta=1.0),
    ],
)
@pytest.mark.parametrize("config", [None, LoraConfig(rank=8, alpha=16)], ids=["full", "lora"])
def test_it_learns_what_is_preferred(folder: Path, pairs: list[Pair], config: LoraConfig | None, chosen: DPO) -> None:
    model, objective = load_module(checkpoint.open(folder)), replace(chosen)
    if config:
        torch.manual_seed(0)
        lora.add(model, config)
    else:
        objective.reference.ask(model, pairs)
    loop = make(model, pairs, steps=12, rate=3e-3, size=4, objective=objective)
    first = loop.evaluate(pairs)
    while not loop.done:
        last = loop.step()
    then = loop.evaluate(pairs)
    if chosen.refers:
        assert first.seen["rewards/margins"] == pytest.approx(0.0, abs=1e-5)
    assert then.loss < 0.8 * first.loss
    assert then.seen["rewards/accuracies"] == 1.0
    assert then.seen["rewards/margins"] > 0.5
    assert last.seen.keys() == then.seen.keys()
    assert last.targets == 4  # pairs


@pytest.mark.parametrize("precision", ["bf16", "f16"])
def test_reference_and_policy_are_computed_in_the_same_type(folder: Path, pairs: list[Pair], precision: Any) -> None:
    """Or rewards would not be zero before the first step."""
    for config in (LoraConfig(rank=4), None):
        model, objective = load_module(checkpoint.open(folder)), DPO()
        loop = make(model, pairs, size=1, precision=precision, objective=objective)
        with loop.autocast():
            if config:
                lora.add(model, config)
            else:
                objective.reference.ask(model, pairs)
        seen = loop.evaluate(pairs).seen
        assert (seen["rewards/chosen"], seen["rewards/accuracies"]) == (0.0, 0.5)


def test_one_pair_that_is_far_off_is_no_leap(folder: Path, pairs: list[Pair]) -> None:
    """A margin of -10 where the others are learned costs 10; hundreds of that are one."""
    loop = make(load(folder, LORA), pairs, objective=DPO())
    loop.position.losses = [0.01] * 20
    loop._check(10.0, [0])
    with pytest.raises(Exception, match="the loss leapt to"):
        loop._check(20.0, [0])


# -- data, settings and runs --


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    return write_sums(path, lambda a, b: {"chosen": f" {a + b}.", "rejected": f" {a * b} or so"})


def settings(model: Path, data: Path, **changes: Any) -> Settings:
    base = Settings(str(model), str(data), lora=LORA, max_steps=6, batch_size=2, accumulate=2, lr=1e-2, save_every=3)
    return replace(base, **{"eval_every": 3, "objective": DPO(), **changes})


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
def test_resumed_is_as_if_never_stopped(folder: Path, data: Path, tmp_path: Path, lora: LoraConfig | None) -> None:
    """The reference is that of before the first step, not of where the run was stopped."""
    chosen = settings(folder, data, lora=lora, lr=1e-2 if lora else 1e-3)
    assert run_of(chosen, tmp_path / "whole").train()
    calls = count()
    assert not run_of(chosen, tmp_path / "parts").train(stop=lambda: next(calls) == 4)
    again = run_of(chosen, tmp_path / "parts")
    torch.manual_seed(77)  # another process has another state
    again.resume()
    assert again.loop.position.step == 4
    assert again.train()
    assert timeless(tmp_path / "parts") == timeless(tmp_path / "whole")
    held_out = [line for line in timeless(tmp_path / "whole") if "held_out_loss" in line]
    assert held_out[-1]["held_out_rewards/margins"] > held_out[0]["held_out_rewards/margins"] == 0
    every = [path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*.safetensors")]
    results = [path for path in every if "checkpoints" not in path.parts]  # which were made at other steps
    assert results
    assert all((tmp_path / "parts" / path).read_bytes() == (tmp_path / "whole" / path).read_bytes() for path in results)


@pytest.mark.parametrize(("old", "new"), [("6 or so", "7 or so"), ('" 7."', '" 8."')], ids=["rejected", "chosen"])
def test_a_run_knows_its_preferences(folder: Path, data: Path, tmp_path: Path, old: str, new: str) -> None:
    run_of(settings(folder, data), tmp_path / "run").train(stop=lambda: True)
    assert old in data.read_text()
    data.write_text(data.read_text().replace(old, new))
    with pytest.raises(BadRequest, match="was made with other examples: what their name stands for has"):
        run_of(settings(folder, data), tmp_path / "run").resume()


def test_another_beta_is_another_run(folder: Path, data: Path, tmp_path: Path) -> None:
    run_of(settings(folder, data), tmp_path / "run").train(stop=lambda: True)
    with pytest.raises(BadRequest, match=r"made with beta=0\.1, and now it is 0\.2; resume"):
        run_of(settings(folder, data, objective=DPO(beta=0.2)), tmp_path / "run").resume()


def test_each_objective_has_data_of_its_own(folder: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(
        BadFile, match=r"line 1: chosen\+rejected is what pronk dpo, kto .*; here it is messages .*; prompt\+com"
    ):
        run_of(settings(folder, data, objective=SFT()), tmp_path / "run")
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "a", "completion": "b"}\n')
    for changes in ({"data": str(other)}, {"eval_data": str(other)}):
        with pytest.raises(
            BadFile, match=r"other.jsonl: line 1: prompt\+completion is what pronk finetune learns from"
        ):
            run_of(replace(settings(folder, data), **changes), tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beta": 0.0}, "beta must be from 1e-09 to 1e"),
        ({"beta": float("nan")}, "beta must be from 1e-09 to 1e"),
        ({"beta": 1e300}, "beta must be from 1e-09 to 1e"),  # rewards of no float32: "the loss leapt to 1 from inf"
        ({"label_smoothing": 0.5}, "label_smoothing must be from 0 to less than 0.5"),
        ({"loss_type": "sigmoidal"}, "the loss must be one of sigmoid, hinge, ipo, simpo, orpo"),
        (
            {"loss_type": "ipo", "label_smoothing": 0.1},
            "is for the sigmoid loss and simpo; with ipo leave it out",
        ),
        ({"simpo_gamma": 0.7}, "simpo_gamma is for the simpo loss; with sigmoid leave it out"),
        ({"loss_type": "simpo", "simpo_gamma": -1.0}, "simpo_gamma must be from 0 to 1e"),
    ],
)
def test_settings_out_of_range(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        DPO(**change)


def test_what_a_cut_leaves_of_pairs(folder: Path) -> None:
    """A record is counted once; one whose answers differ only behind the cut teaches nothing."""
    source = checkpoint.open(folder).tokenizer
    assert source
    encoder = Encoder(tokenizer.load(source), 6, too_long="cut")
    long = parse({"prompt": "2+2=", "chosen": "4444", "rejected": "four"}, "")
    alike = parse({"prompt": "2+2=", "chosen": "fourteen", "rejected": "four"}, "")
    (pair,) = DPO().encode(long, encoder)
    assert (len(pair), encoder.cut, encoder.skipped) == (12, 1, 0)
    assert DPO().encode(alike, encoder) == []
    assert (encoder.cut, encoder.skipped) == (1, 1)
    skipping = Encoder(encoder.tokenizer, 6, too_long="skip")
    assert DPO().encode(long, skipping) == []
    assert skipping.skipped == 1


def test_answers_that_are_the_same_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = checkpoint.open(folder).tokenizer
    assert source
    encoder = Encoder(tokenizer.load(source), 100)
    plain = encoder.tokenizer.encode
    monkeypatch.setattr(encoder.tokenizer, "encode", lambda text, **more: plain(text.lower(), **more))
    with pytest.raises(BadRecord, match="are the same tokens: nothing is preferred"):
        DPO().encode(parse({"prompt": "a", "chosen": "B", "rejected": "b"}, ""), encoder)


def test_of_a_run_that_begins_from_an_adapter_it_is_the_reference(folder: Path, data: Path, tmp_path: Path) -> None:
    """Switched off it would be the model before fine-tuning, and the first loss not ln 2."""
    run_of(settings(folder, data, max_steps=3), tmp_path / "first").train()
    second = run_of(settings(folder, data, from_adapter=str(tmp_path / "first")), tmp_path / "second")
    assert lora.begun(second.model)
    assert second.loop.evaluate(second.data.held_out).loss == pytest.approx(np.log(2), abs=1e-6)
