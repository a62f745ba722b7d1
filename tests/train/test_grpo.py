"""GRPO: TRL's loss and gradients, advantages, rollouts of what is trained, hostile rewards, runs that go on."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_folder import save_tiny_chat_model

import pronk
from pronk import checkpoint
from pronk.cli.training_rollouts import show
from pronk.cpu_engine import ENGINE
from pronk.errors import BadFile, BadRequest, PronkError
from pronk.torch_engine.backend import load_module
from pronk.train import lora
from pronk.train.data.examples import Prompt
from pronk.train.objectives.grpo import GRPO, of_reference, of_tokens
from pronk.train.objectives.rollouts import FILE
from pronk.train.rewards.names import parse
from pronk.train.rollouts.texts import Answered, Completion

CPU = torch.device("cpu")
STORIES = Path(__file__).parents[3] / "shared" / "data" / "stories260K"
QUICK: dict[str, Any] = {
    "max_steps": 3, "accumulate": 2, "batch_size": 2, "num_generations": 4, "max_new_tokens": 6, "lr": 1e-2,
    "samples": 0, "device": "cpu", "threads": 1, "lora_rank": 4, "save_every": 1,
    "reward_timeout": 600.0,  # by the clock, which a busy machine does not heed
}  # fmt: skip
REWARDS_FILE = """
import signal, subprocess, sys, time
import numpy as np

def vowels(prompt, completion, record):
    print("goes nowhere")
    return sum(letter in "aeiou" for letter in completion) + record.get("more", 0)

def codes(prompt, completion, record):
    return sum(map(ord, completion)) / 100

def prompted(prompt, completion, record):
    return float(prompt == record["prompt"])

def numpys(prompt, completion, record):
    return np.float32(0.5)

def truth(prompt, completion, record):
    return True

def raises(prompt, completion, record):
    raise KeyError("gold")

def leaves(prompt, completion, record):
    sys.exit(3)

def hangs(prompt, completion, record):
    while True:
        pass

def sleeps(prompt, completion, record):
    time.sleep(1000)

def clockless(prompt, completion, record):
    signal.alarm(5)
    signal.alarm(0)  # pronk's clock was this one
    time.sleep(1000)

def reads(prompt, completion, record):
    return float(input())

def nan(prompt, completion, record):
    return float("nan")

def text(prompt, completion, record):
    return "1.0"

def huge(prompt, completion, record):
    return 1e38 if len(completion) % 2 else -1e38

def nothing(prompt, completion, record):
    return None

def narrow(prompt, completion):
    return 0.0

def starts(prompt, completion, record):
    return subprocess.run([sys.executable, "-c", "import sys; sys.stderr.write('e' * 300_000)"]).returncode

class Speechless(Exception):
    def __str__(self):
        return self.absent

def speechless(prompt, completion, record):
    raise Speechless

def several(prompt, completion, record):
    import numpy
    return numpy.zeros(2)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=64)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    lines = [{"prompt": f"{a} and {b}", "answer": str(a + b)} for a in range(4) for b in range(5)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(REWARDS_FILE)
    return path


# -- the loss --

PROMPTS = [[1, 70, 71, 72], [1, 80, 81]]
ANSWERS = [
    [[90, 91, 92, 2], [100, 101], [110, 111, 112, 113, 114]],
    [[90, 2], [120, 121, 122], [130, 131, 132, 133, 134]],
]
REWARDS = np.array([[1.0, 0.0, 0.5], [0.0, 2.0, 1.0]])
SETTINGS = {"num_generations": 3, "max_new_tokens": 5, "epsilon_high": 0.28, "kl_coef": 0.04, "importance_cap": 1.2}

# Loss, KL, share of tokens that are clipped, and norms of gradients, of TRL 1.16's GRPOTrainer, in float32.
_EMBEDDING, _QUERY, _HEAD = "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight"
TRL = {
    "grpo": (
        0.019410530105233192, 0.04209282994270325, 3 / 21,
        {_EMBEDDING: 2.066784143447876, _QUERY: 0.7728413343429565, _HEAD: 1.3299046754837036},
    ),
    "dr_grpo": (
        -0.050557635724544525, 0.04209282994270325, 3 / 21,
        {_EMBEDDING: 0.88863605260849, _QUERY: 0.36472275853157043, _HEAD: 0.5610141754150391},
    ),
    "dapo": (
        -0.11894668638706207, 0.04209282994270325, 3 / 21,
        {_EMBEDDING: 1.4919586181640625, _QUERY: 0.6283328533172607, _HEAD: 0.9403620362281799},
    ),
}  # fmt: skip


def noise(number: int) -> list[Any]:
    return [np.random.default_rng([number, i]).normal(0, 0.3, 5).astype(np.float32) for i in range(6)]


def groups(settings: GRPO, logprobs: list[Any] | None = None) -> list[Answered]:
    """The rollouts above, with advantages; `logprobs`: what the sampler is to have given the tokens of each."""
    found, advantages = [], settings.advantages(REWARDS)
    given = iter(logprobs or [[0.0] * 5] * 6)
    for prompt, answers, own, worth in zip(PROMPTS, ANSWERS, advantages.tolist(), REWARDS.tolist(), strict=True):
        completions = tuple(
            Completion(tuple(tokens), tuple(map(float, next(given)[: len(tokens)])), tokens[-1] == 2,
                       reward=reward, rewards={"own": reward}, advantage=advantage)
            for tokens, reward, advantage in zip(answers, worth, own, strict=True)
        )  # fmt: skip
        asked = Prompt(np.array(prompt, np.int32), "", {}, 3, 5)
        found.append(Answered(asked, completions))
    return settings.shared(found)


def rows(values: list[Any]) -> torch.Tensor:
    """Of each token of each answer, side by side as in a micro-batch: a group's shorter answers first."""
    given = iter(values)
    flat = [sorted((next(given)[: len(tokens)] for tokens in some), key=len) for some in ANSWERS]
    joined = np.concatenate([each for some in flat for each in some])
    return torch.from_numpy(np.pad(joined, (0, -len(joined) % 16)))


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_loss_and_gradients_are_trl_s(folder: Path, loss_type: Any) -> None:
    """On the same rollouts, with ratios that are clipped, a divergence, and truncated importance weights. What was
    before, what the reference says and what the sampler did is what the model says now, with noise."""
    settings = GRPO(loss_type=loss_type, **SETTINGS)  # type: ignore[arg-type]
    model = load_module(checkpoint.open(folder))
    first = settings.collate(groups(settings), CPU)
    now = of_tokens(model, first).detach()
    before = now + rows(noise(1))
    batch = replace(first, before=before, reference=now + rows(noise(2)), sampled=before + rows(noise(3)))
    cost, seen = settings.loss(model, batch)
    (cost / batch.weight).backward()
    loss, kl, clipped, norms = TRL[loss_type]
    assert float(cost.detach()) / batch.weight == pytest.approx(loss, rel=2e-5, abs=2e-6)
    assert seen["kl"] / batch.weight == pytest.approx(kl, rel=1e-4)
    assert seen["clip_ratio"] / batch.weight == pytest.approx(clipped, abs=1e-6)
    assert clipped > 0.05
    parameters = dict(model.named_parameters())
    for name, norm in norms.items():
        assert float(parameters[name].grad.norm()) == pytest.approx(norm, rel=2e-4), name  # type: ignore[union-attr]


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo"])
def test_how_completions_are_dealt_out_changes_nothing(folder: Path, loss_type: Any) -> None:
    settings = GRPO(loss_type=loss_type, **SETTINGS)  # type: ignore[arg-type]
    model = load_module(checkpoint.open(folder))
    lora.add(model, pronk.checkpoint.adapter.LoraConfig(rank=2, alpha=4))
    whole, _ = settings.loss(model, settings.collate(groups(settings), CPU))
    parts = [settings.loss(model, settings.collate([one], CPU))[0] for one in groups(settings)]
    assert float(sum(parts).detach()) == pytest.approx(float(whole.detach()), abs=1e-5)  # type: ignore[union-attr]


def test_gradients_are_the_same_each_time(folder: Path) -> None:
    """A prompt's last row is read for the first token of each of its completions. Two threads added up what came back
    to it in whatever order they came by, so that now and then a run was another one."""
    settings, draw, each = GRPO(num_generations=64, max_new_tokens=20), np.random.default_rng(3), 20
    completions = tuple(
        Completion(tuple(draw.integers(3, 250, each).tolist()), (-5.0,) * each, ended=False, advantage=float(advantage))
        for advantage in draw.normal(size=64)
    )
    prompt = Prompt(np.array(PROMPTS[0], np.int32), "", {}, 64, each)
    model, threads = load_module(checkpoint.open(folder)), torch.get_num_threads()

    def gradient() -> torch.Tensor:
        model.zero_grad()
        batch = settings.collate([Answered(prompt, completions, 1.0)], CPU)
        settings.loss(model, batch)[0].backward()
        (found,) = [p.grad for name, p in model.named_parameters() if name == "model.layers.0.self_attn.v_proj.weight"]
        assert found is not None
        return found.clone()

    torch.set_num_threads(2)
    try:
        first = gradient()
        assert first.abs().max() > 0
        for _ in range(60):
            assert torch.equal(gradient(), first)
    finally:
        torch.set_num_threads(threads)


def test_advantages_are_their_formulas() -> None:
    rewards = torch.from_numpy(REWARDS)
    away = rewards - rewards.mean(1, keepdim=True)
    others = torch.stack([(rewards.sum(1) - rewards[:, i]) / 2 for i in range(3)], 1)
    expected = {
        GRPO(): away / (rewards.std(1, keepdim=True) + 1e-4),
        GRPO(scale_rewards="batch"): away / (rewards.std() + 1e-4),
        GRPO(loss_type="dr_grpo"): away,
        GRPO(estimator="rloo"): rewards - others,
    }
    for settings, advantages in expected.items():
        np.testing.assert_allclose(settings.advantages(REWARDS), advantages.numpy(), rtol=1e-12)
    assert not GRPO().advantages(np.full((2, 3), 0.1)).any()


def test_the_reference_is_the_model_without_its_adapter(folder: Path) -> None:
    settings, model = GRPO(**SETTINGS), load_module(checkpoint.open(folder))  # type: ignore[arg-type]
    batch = settings.collate(groups(settings), CPU)
    plain = of_tokens(model, batch).detach()
    lora.add(model, pronk.checkpoint.adapter.LoraConfig(rank=2, alpha=4))
    with torch.no_grad():
        for _, layer in lora.layers(model):
            layer.lora_B.normal_(0, 0.2)
    assert float((of_tokens(model, batch).detach() - plain).abs().max()) > 1e-2
    torch.testing.assert_close(of_reference(model, batch), plain, rtol=1e-5, atol=1e-5)
    assert all(layer.enabled for _, layer in lora.layers(model))


# -- rollouts --


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
def test_the_engine_writes_with_what_is_trained(
    folder: Path, data: Path, functions: Path, tmp_path: Path, full: bool
) -> None:
    """After each step it has the new numbers: were it one step behind, log-probabilities would part."""
    quick = {name: value for name, value in QUICK.items() if not (full and name == "lora_rank")}
    run = pronk.grpo(folder, data, tmp_path / "out", reward=f"{functions}:vowels", full=full, **quick)
    steps = [line for line in run if "loss" in line]
    assert all(line["mismatch/logps"] < 1e-5 for line in steps)
    assert all(abs(line["mismatch/ratio"] - 1) < 1e-5 for line in steps)
    assert len({line["logps"] for line in steps}) == 3
    written = lines(tmp_path / "out")
    assert len(written) == 3 * 4 * 4
    assert all(line["reward"] == sum(letter in "aeiou" for letter in line["completion"]) for line in written)
    assert {line["step"] for line in written} == {1, 2, 3}
    for at in range(0, len(written), 4):
        assert sum(line["advantage"] for line in written[at : at + 4]) == pytest.approx(0, abs=1e-9)
        assert len({line["prompt"] for line in written[at : at + 4]}) == 1
    assert steps[0]["reward"] == pytest.approx(np.mean([line["reward"] for line in written[:16]]))


def test_one_that_is_handed_nothing_is_found_out(
    folder: Path, data: Path, functions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inverse of the test before."""
    from pronk.train.rollouts.sampler import EngineSampler

    monkeypatch.setattr(EngineSampler, "_take", lambda sampler, model: None)
    run = pronk.grpo(folder, data, tmp_path / "out", reward=f"{functions}:codes", **QUICK)
    apart = [line["mismatch/logps"] for line in run if "loss" in line]
    assert apart[0] < 1e-5
    assert min(apart[1:]) > 1e-3


@pytest.mark.parametrize("how", [{}, {"recompute": 1}, {"precision": "bf16"}, {"full": True}], ids=str)
def test_exact_rollouts_are_the_pass_that_is_trained_on_to_the_bit(
    folder: Path, data: Path, functions: Path, tmp_path: Path, how: dict[str, Any]
) -> None:
    quick = {name: value for name, value in QUICK.items() if not ("full" in how and name == "lora_rank")}
    run = pronk.grpo(
        folder, data, tmp_path / "out", reward=f"{functions}:vowels", rollout="exact", **quick, **how, eval_share=0
    )
    for line in run:
        assert (line["mismatch/kl"], line["mismatch/logps"]) == (0, 0)
        assert line["mismatch/ratio"] == pytest.approx(1, abs=1e-12)  # a mean of ones


def test_eight_bits_write_otherwise_and_it_shows(folder: Path, data: Path, functions: Path, tmp_path: Path) -> None:
    apart = {}
    for kind in ("f32", "int8"):
        run = pronk.grpo(
            folder, data, tmp_path / kind, reward=f"{functions}:vowels", rollout_quantize=kind, eval_share=0, **QUICK
        )
        apart[kind] = [line["mismatch/kl"] for line in run]
    assert max(apart["f32"]) < 1e-9
    assert min(apart["int8"]) > 1e-6


def test_groups_of_equal_rewards_are_not_learned_from_and_nothing_changes_by_that(
    folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A digit in three random bytes is rare: here some groups and some whole steps teach nothing. AdamW takes a step
    all the same, by what it remembers."""
    told: list[bool] = []
    teaches = GRPO.teaches

    def learned_from(name: str) -> tuple[bytes, list[float]]:
        run = pronk.grpo(
            folder, data, tmp_path / name, reward="regex:[0-9]", eval_share=0,
            **{**QUICK, "max_new_tokens": 3, "batch_size": 1, "max_steps": 8, "precision": "f32"},
        )  # fmt: skip
        norms = [line["grad_norm"] for line in run]
        return (tmp_path / name / "adapter_model.safetensors").read_bytes(), norms

    monkeypatch.setattr(GRPO, "teaches", lambda self, batch: bool(told.append(teaches(self, batch)) or told[-1]))
    spared = learned_from("spared")
    monkeypatch.setattr(GRPO, "teaches", lambda self, batch: True)
    assert learned_from("whole") == spared
    assert 0 < sum(told) < len(told)
    assert 0.0 in spared[1]
    assert max(spared[1]) > 0


def test_a_first_step_that_teaches_nothing_in_f16(folder: Path, data: Path, tmp_path: Path) -> None:
    """Its scaler of gradients had met no loss: \"AssertionError: Attempted unscale_ but _scale is None\"."""
    run = pronk.grpo(folder, data, tmp_path / "out", reward="length:1000", eval_share=0, precision="f16", **QUICK)
    assert [line["grad_norm"] for line in run] == [0, 0, 0]


@pytest.mark.parametrize(("reward", "said"), [("length:1000", True), ("regex:[0-9a-f]", False)])
def test_a_reward_that_tells_nothing_apart_is_told(
    folder: Path, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, reward: str, said: bool
) -> None:
    """Each step, and the command ended as if something had been learned."""
    with caplog.at_level("INFO", "pronk.train"):
        run = pronk.grpo(folder, data, tmp_path / "out", reward=reward, eval_share=0, **{**QUICK, "max_new_tokens": 3})
        assert ({line["frac_reward_zero_std"] for line in run} == {1.0}) is said
    assert ("no reward was learned from" in caplog.text) is said


def test_dynamic_sampling_replaces_groups_that_tell_nothing(folder: Path, data: Path, tmp_path: Path) -> None:
    """A digit in six random bytes is rare: most groups have none at all."""
    shares = {}
    for dynamic in (False, True):
        run = pronk.grpo(
            folder, data, tmp_path / str(dynamic), reward="regex:[0-9a-f]", dynamic_sampling=dynamic, eval_share=0,
            **{**QUICK, "max_new_tokens": 3},
        )  # fmt: skip
        steps = list(run)
        shares[dynamic] = float(np.mean([line["frac_reward_zero_std"] for line in steps]))
        assert all(line["targets"] == 16 for line in steps)
    assert shares[True] < shares[False]


def test_several_rewards_are_weighed(folder: Path, data: Path, functions: Path, tmp_path: Path) -> None:
    run = pronk.grpo(
        folder, data, tmp_path / "out", reward=[f"{functions}:vowels", "length:3", "exact", "regex:e"],
        reward_weights=[1, 0.5, 2, -1], **QUICK,
    )  # fmt: skip
    steps = [line for line in run if "loss" in line]
    for line in lines(tmp_path / "out"):
        each = line["rewards"]
        assert list(each) == ["vowels", "length", "exact", "regex"]
        assert line["reward"] == pytest.approx(
            each["vowels"] + 0.5 * each["length"] + 2 * each["exact"] - each["regex"], abs=1e-9
        )
        tokens = line["tokens"] - line["ended"]
        assert each["length"] == pytest.approx(max(0, 1 - abs(tokens - 3) / 3))
        assert each["regex"] == float("e" in line["completion"])
    assert {"rewards/vowels", "rewards/length", "rewards/exact", "rewards/regex"} < steps[0].keys()


def test_json_of_a_schema(folder: Path) -> None:
    pytest.importorskip("llguidance")
    from pronk import tokenizer
    from pronk.grammar.compiled import Compiler
    from pronk.grammar.structure import Structure
    from pronk.train.rewards.scorer import Exact, Schema, Text

    source = checkpoint.open(folder).tokenizer
    assert source
    codec = tokenizer.load(source)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    scorer = Schema(Compiler(codec, 259, [2]).compile(Structure.json_schema(schema)))
    asked = Prompt(np.array([1], np.int32), "", {"answer": " 7 "}, 2, 5)

    def worth(said: str, ended: bool = True) -> float:
        return scorer.of([Text(asked, said, codec.encode(said, bos=False), ended)])[0]

    assert worth('{"a": 7}') == worth('{"a":-1}') == 1
    assert worth('{"a": 7}', ended=False) == worth('{"a": "7"}') == worth('{"a": 7') == worth("{}") == worth("") == 0
    assert Exact("answer").of([Text(asked, said, [], True) for said in ("7", "7\n", "77", "")]) == [1, 1, 0, 0]


def test_a_reward_model(folder: Path, data: Path, tmp_path: Path) -> None:
    """Its folder, or its adapter's; each completion gets what LLM.score gives the text."""
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(
        json.dumps({"prompt": f"{n} and", "chosen": f" {n}.", "rejected": " or so"}) + "\n" for n in range(8)
    ))  # fmt: skip
    quick = {"max_steps": 1, "samples": 0, "device": "cpu", "threads": 1}
    pronk.reward(folder, pairs, tmp_path / "rm", lora_rank=2, **quick).run()  # type: ignore[arg-type]
    pronk.grpo(folder, data, tmp_path / "out", reward=tmp_path / "rm", **{**QUICK, "max_steps": 1}).run()  # type: ignore[arg-type]
    llm = pronk.load(folder, adapter=tmp_path / "rm")
    for line in lines(tmp_path / "out")[:6]:
        assert line["rewards"]["rm"] == pytest.approx(llm.score(line["prompt"] + line["completion"]), abs=1e-5)
    with pytest.raises(BadRequest, match="tiny is no reward model, and none of the rewards that pronk has"):
        pronk.grpo(folder, data, tmp_path / "other", reward=str(folder), **QUICK).run()


def test_a_text_that_a_reward_model_has_no_room_for(folder: Path, tmp_path: Path) -> None:
    """It was told of a text, of no reward, and to raise a ctx_size that no option of a run is."""
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}')
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "a" * 58}))
    quick = {"max_steps": 1, "samples": 0, "device": "cpu", "threads": 1}
    pronk.reward(folder, tmp_path / "pairs.jsonl", tmp_path / "rm", lora_rank=2, **quick).run()  # type: ignore[arg-type]
    run = pronk.grpo(folder, tmp_path / "long.jsonl", tmp_path / "out", reward=tmp_path / "rm", **QUICK)
    with pytest.raises(
        PronkError, match=r"the reward model .*/rm reads a prompt with its completion as one text: .* 64 fit"
    ):
        run.run()


# -- hostile rewards --


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("raises", "raises raised KeyError in mine.py, line 22: 'gold', on the completion '"),
        ("leaves", "leaves raised SystemExit in mine.py, line 25: 3"),
        ("hangs", "hangs takes more than 1 s"),
        ("sleeps", "sleeps takes more than 1 s"),
        ("clockless", "clockless takes more than 1 s"),
        ("reads", "reads raised EOFError"),
        ("nan", "nan gave nan, which is no number to learn from"),
        ("huge", "e+38, times its weight of 1: too large to learn from in float32"),
        ("text", "text gave '1.0', and a reward is a number, on the completion '"),
        ("nothing", "nothing gave None, and a reward is a number"),
        ("several", "several gave array([0., 0.]), and a reward is a number"),  # said that it had raised a TypeError
        ("nothign", "nothign is no function of "),
        ("nothign", "mine.py; did you mean nothing?"),
        ("narrow", "narrow is called with a prompt, a completion and a record, and takes (prompt, completion)"),
        ("speechless", "its message cannot be written"),
    ],
)
def test_a_reward_that_goes_wrong_stops_the_run_and_is_named(
    folder: Path, data: Path, functions: Path, tmp_path: Path, name: str, problem: str
) -> None:
    limit = 1.0 if "takes more" in problem else 600.0
    options = {**QUICK, "reward_timeout": limit, "eval_share": 0}
    run = pronk.grpo(folder, data, tmp_path / "out", reward=f"{functions}:{name}", **options)
    with pytest.raises(PronkError, match="the reward ") as caught:
        run.run()
    assert problem in str(caught.value).replace(f"the reward '{name}' ", f"the reward {name} ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("begins", ["run", "rollouts"])
def test_a_script_that_begins_a_run_by_itself_is_told_of(folder: Path, data: Path, tmp_path: Path, begins: str) -> None:
    """Its reward's process imports it, which began a second run: "another run is at work here", it was told. Where it
    asked for rollouts alone, each such process began another one."""
    script = tmp_path / "script.py"
    script.write_text(
        "import pronk\n\ndef short(prompt, completion, record):\n    return -len(completion)\n\n"
        f"pronk.grpo({str(folder)!r}, {str(data)!r}, 'out', reward=short, reward_timeout=300, max_steps=1,\n"
        "           num_generations=2, max_new_tokens=4, samples=0, device='cpu', threads=1)"
        f".{begins}()\n"
    )
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.search(
        r"the reward 'short' raised BadRequest in script\.py, line [67]: script\.py begins a run when", done.stderr
    )
    assert 'if __name__ == "__main__":' in done.stderr
    guarded = script.read_text().replace("pronk.grpo(", "if __name__ == '__main__':\n  pronk.grpo(")
    script.write_text(guarded)
    assert subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True).returncode == 0


def test_a_module_called_pronk_reward_is_anybody_s(
    folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was what a reward's process calls its file: whoever had imported a pronk_reward.py was told that it begins a
    run."""
    (tmp_path / "pronk_reward.py").write_text("def one(prompt, completion, record):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    reward = __import__("pronk_reward").one
    try:
        pronk.grpo(folder, data, tmp_path / "out", reward=reward, **{**QUICK, "max_steps": 1}).run()
    finally:
        del sys.modules["pronk_reward"]


def test_what_a_reward_may_give_and_what_it_is_given(folder: Path, data: Path, functions: Path, tmp_path: Path) -> None:
    names = ["prompted", "numpys", "truth"]
    quick = {**QUICK, "max_steps": 1}
    pronk.grpo(folder, data, tmp_path / "out", reward=[f"{functions}:{name}" for name in names], **quick).run()
    assert all(line["rewards"] == {"prompted": 1, "numpys": 0.5, "truth": 1} for line in lines(tmp_path / "out"))


def test_programs_that_a_reward_starts_may_say_what_they_like(functions: Path) -> None:
    """Nobody read what they said to stderr: a pipe's 64 KiB of it, and they waited for ever."""
    from pronk.train.rewards.process import InProcess
    from pronk.train.rewards.scorer import Text

    asked = Prompt(np.array([1], np.int32), "", {}, 2, 5)
    process = InProcess.function("starts", str(functions), "starts", 60.0)
    assert process.of([Text(asked, "aaa", [], True)]) == [0]


def test_an_expression_that_would_take_for_ever(folder: Path, data: Path) -> None:
    from pronk.train.rewards.process import InProcess
    from pronk.train.rewards.scorer import Text

    asked = Prompt(np.array([1], np.int32), "", {}, 2, 5)
    assert InProcess.pattern("regex", "(a+)+$", 600.0).of([Text(asked, "aaa", [], True)]) == [1]
    process = InProcess.pattern("regex", "(a+)+$", 0.5)
    with pytest.raises(PronkError, match=r"the reward 'regex' takes more than 0.5 s"):
        process.of([Text(asked, "a" * 60 + "b", [], True)])


def test_records_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    for record, problem in [
        ({"text": "a"}, "text is what pronk finetune learns from; here it is prompt"),
        ({"prompt": 3}, "prompt must be text, not 3"),
        ({"prompt": "a"}, "has no answer, with which the reward compares"),
        ({"prompt": "a", "answer": None}, "has no answer, with which the reward compares"),  # "None" was right
        ({"prompt": "a", "answer": ["b"]}, r"answer, with which .* must be text or a number, not \['b'\]"),
        ({"prompt": "a" * 70, "answer": "b"}, "takes 70 tokens, and beside 6 new ones 58 is the most"),
    ]:
        path.write_text(json.dumps(record))
        with pytest.raises(BadFile, match=problem):
            _ = pronk.grpo(folder, path, reward="exact", **QUICK).data
    talk = [{"role": "user", "content": "Sing."}]
    path.write_text(json.dumps({"prompt": talk, "answer": "b", "more": [1, None]}))
    (prompt,) = pronk.grpo(folder, path, reward="exact", **QUICK).data.train
    assert prompt.said == talk
    assert prompt.record["more"] == [1, None]
    own = pronk.load(folder).chat_prompt(talk)
    assert prompt.ids.tolist() == own


def test_more_new_tokens_than_a_text_may_have(folder: Path, data: Path) -> None:
    """It said of each record that beside 200 new tokens -136 was the most, and to skip such records."""
    options = {**QUICK, "max_new_tokens": 200}
    with pytest.raises(BadRequest, match="max_new_tokens=200 leaves no room for a prompt in the 64 tokens") as caught:
        _ = pronk.grpo(folder, data, reward="length:3", **options).data  # type: ignore[arg-type]
    assert "skip" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("own.py", "names no function at the top level of a file: own.py:NAME"),
        ("own.py:my-reward", "names no function at the top level of a file: own.py:NAME"),
        ("lenght:20", "there is no reward 'lenght'; did you mean length:20?"),
        ("regexp:^a", r"did you mean regex:\^a?"),
    ],
)
def test_a_reward_that_was_meant_otherwise_is_no_model(name: str, problem: str) -> None:
    """They were looked for as reward models: \"own.py is not a model: neither GGUF ...\"."""
    with pytest.raises(BadRequest, match=problem):
        parse(name)
    assert parse("smollm2:135m").kind == "model"


# -- runs --


def test_what_is_foretold_is_with_the_engine(folder: Path, data: Path) -> None:
    plans = [pronk.grpo(folder, data, reward="exact", rollout=how, **QUICK).plan() for how in ("engine", "exact")]  # type: ignore[arg-type]
    assert plans[0].process - plans[1].process > 100_000
    assert plans[0].tokens == 2 * 4 * (7 + 6 - 1) or plans[0].tokens >= 8 * 12


def test_what_is_foretold_is_with_reward_models_and_looks(folder: Path, data: Path) -> None:
    """Neither was: a reward model is as large as what it scores, and a look writes to all held-out prompts at once."""

    def foretold(reward: str, **more: Any) -> float:
        plan = pronk.grpo(folder, data, reward=reward, rollout_quantize="f32", **QUICK, **more).plan()
        return plan.process - plan.held

    alone, engine = foretold("length:3", eval_share=0), ENGINE.plan(checkpoint.open(folder), {"quantize": "f32"})
    assert foretold(str(folder), eval_share=0) - alone == engine.weights + engine.besides
    longer = len("3 and 4") + QUICK["max_new_tokens"]
    assert foretold("length:3", eval_share=0.5) - alone == engine.kv_a_token * longer * (10 - 4) * 4


def test_a_reward_model_of_dora_is_foretold_as_it_is_held(data: Path, tmp_path: Path) -> None:
    """It was counted in the 8 bits of its base's file, and is merged in float32."""
    base, pairs = STORIES / "stories260K_q80.bin", tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    quick: dict[str, Any] = {"max_steps": 1, "samples": 0, "device": "cpu", "threads": 1, "lora_rank": 2}

    def foretold(reward: str | Path) -> int:
        plan = pronk.grpo(base, data, reward=reward, **QUICK).plan()
        return plan.process - plan.held

    for dora in (False, True):
        pronk.reward(base, pairs, tmp_path / f"rm{dora}", dora=dora, **quick).run()
    opened = checkpoint.open(base)
    in_float, in_codes = (ENGINE.plan(opened, {"quantize": format}).weights for format in ("f32", "auto"))
    more = foretold(tmp_path / "rmTrue") - foretold(tmp_path / "rmFalse")
    assert more > 0.8 * (in_float - in_codes)


def test_what_python_is_told(folder: Path, data: Path, functions: Path, tmp_path: Path) -> None:
    run = pronk.grpo(folder, data, tmp_path / "out", reward=f"{functions}:vowels", **QUICK, eval_every=1)
    held = [line for line in run if "held_out_loss" in line]
    assert all(line["held_out_reward"] == -line["held_out_loss"] for line in held)
    result = run.result
    assert result.held_out_reward
    assert result.held_out_reward["kept"] == max(line["held_out_reward"] for line in held[1:])
    assert result.mismatch is not None
    assert 0 <= result.mismatch < 1e-8
    assert {"reward", "mismatch"} < result.to_dict().keys()
    assert "reward" in (tmp_path / "out" / "loss.svg").read_text()


def test_functions_of_ones_own_are_found_by_their_file(functions: Path) -> None:
    from pronk.train.rewards.names import labels, spelled

    space: dict[str, Callable[..., Any]] = {}
    exec(compile(functions.read_text(), str(functions), "exec"), space)
    assert spelled(space["vowels"]) == f"{functions}:vowels"
    assert labels([f"{functions}:vowels", "regex:a", "regex:b", "a/rm", "exact:x"]) == [
        "vowels", "regex", "regex#2", "rm", "exact",
    ]  # fmt: skip
    assert labels(["x#2", "x", "x", "x"]) == ["x#2", "x", "x#3", "x#4"]  # of which two were one


# -- what it learns --


def test_a_reward_rises(tmp_path: Path) -> None:
    """llama2.c's model of 260K parameters learns to write happy stories, on prompts that it never saw, too. Words for
    joy in 24 tokens: 0.1 at first; over 0.8 after 12 steps is far beyond what its noise (0.05) makes."""
    if not STORIES.exists():
        pytest.skip(f"{STORIES} is absent")
    names, things = ("Lily", "Tom", "Ben", "Mia", "Sam", "Anna"), ("ball", "dog", "cake", "hat", "car", "bird")
    begun = "Once upon a time there was a child named"
    prompts = [f"{begun} {name}. {name} had a {thing}." for name in names for thing in things]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": one}) + "\n" for one in prompts))
    (tmp_path / "joy.py").write_text(
        "def joy(prompt, completion, record):\n"
        "    words = [word.strip('.,!?').lower() for word in completion.split()]\n"
        "    return sum(word in ('happy', 'smile', 'smiled', 'fun') for word in words)\n"
    )
    run = pronk.grpo(
        STORIES / "stories260K.bin", tmp_path / "prompts.jsonl", tmp_path / "out", reward=f"{tmp_path}/joy.py:joy",
        tokenizer=STORIES / "tok512.bin", full=True, lr=3e-4, max_steps=12, accumulate=2, batch_size=4, eval_every=6,
        max_new_tokens=24, eval_share=0.2, samples=0, device="cpu", threads=1,
    )  # fmt: skip
    steps = list(run)
    held = [line["held_out_reward"] for line in steps if "held_out_loss" in line]
    assert held[0] < 0.3
    assert held[-1] > held[0] + 0.5
    assert max(line["mismatch/kl"] for line in steps if "loss" in line) < 1e-9
    assert math.isfinite(steps[-1]["held_out_loss"])


# -- what an outsider found --


def test_exact_rollouts_have_no_format_of_their_own() -> None:
    with pytest.raises(BadRequest, match="leave rollout_quantize out"):
        GRPO(rollout="exact", rollout_quantize="q4")


def test_bounds_of_ratios_are_numbers_of_float32() -> None:
    """1e300 passed, and the first step ended in torch's RuntimeError."""
    with pytest.raises(BadRequest, match=r"epsilon_high must be over 0 and up to 1e\+09"):
        GRPO(epsilon_high=1e300)


def test_a_group_that_no_machine_holds() -> None:
    """A million completions were rehearsed for minutes before memory was said not to suffice."""
    with pytest.raises(BadRequest, match="1048576 tokens that a group may have"):
        GRPO(num_generations=1_000_000)
    GRPO(num_generations=1024, max_new_tokens=1024)


def test_one_reward_has_one_weight(folder: Path, data: Path) -> None:
    """The weight of one was to be a list, where the reward itself need not be: \"'float' object is not iterable\"."""
    run = pronk.grpo(folder, data, reward="exact", reward_weights=0.5, **QUICK)
    assert run.settings.objective.reward_weights == (0.5,)
    with pytest.raises(BadRequest, match="reward_weights must be a list of numbers"):
        pronk.grpo(folder, data, reward="exact", reward_weights="1,2", **QUICK)  # type: ignore[arg-type]


def test_a_length_of_many_digits_is_no_length() -> None:
    """int() refuses 5,000 digits with a ValueError."""
    with pytest.raises(BadRequest, match="a whole number of tokens"):
        parse("length:" + "9" * 5000)


def test_a_broken_schema_is_named(folder: Path, data: Path, tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    broken = tmp_path / "broken.json"
    for text, problem in (("not JSON", "not JSON"), (None, "No such file")):
        broken.unlink(missing_ok=True) if text is None else broken.write_text(text)
        with pytest.raises(BadRequest) as caught:
            pronk.grpo(folder, data, reward=f"schema:{broken}", **QUICK).rollouts()  # type: ignore[arg-type]
        assert str(caught.value).startswith(f"{broken}, a reward's schema: ")
        assert problem in str(caught.value)
        assert str(caught.value).count(str(broken)) == 1


def test_large_rewards_are_short(capsys: pytest.CaptureFixture[str]) -> None:
    line = {
        "step": 1, "prompt": "a", "completion": "b", "reward": 1e300, "rewards": {"own": 1e300}, "advantage": 0.0,
        "tokens": 1, "ended": True,
    }  # fmt: skip
    show([line], as_json=False)
    shown = capsys.readouterr()
    assert "  +1e+300  b" in shown.out
    assert "of 1 of 1 prompts all completions are worth the same: nothing is learned from these" in shown.err
    show([line, {**line, "reward": 0.0}], as_json=False)
    assert "worth the same" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("accuracy", r"no reward 'accuracy'; there are exact, regex, schema and length, a function of your own \(file"),
        ("exakt", "there is no reward 'exakt'; did you mean exact?"),
        ("runs/nothere", "there is no folder 'runs/nothere', which a reward model would be; pronk reward makes one"),
        ("./nothere", "there is no folder './nothere'"),
        ("a/b/c", "there is no folder 'a/b/c'"),
    ],
)
def test_a_reward_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, problem: str) -> None:
    """It was told after the model had been loaded, and of files and repositories. Nothing is loaded here."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    with pytest.raises(BadRequest, match=problem):
        pronk.grpo("m", "d", reward=["exact", name])
    for good in ("runs/mine", "owner/name", "smollm2:135m", "file.py:mine"):
        pronk.grpo("m", "d", reward=good)
