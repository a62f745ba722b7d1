"""Reward models: Bradley and Terry's loss, transformers' and PEFT's models and gradients, one score on every path."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_folder import save_tiny_chat_model
from training_runs import timeless, write_sums

import pronk
from pronk import checkpoint, tokenizer
from pronk.checkpoint.adapter import LoraConfig
from pronk.checkpoint.containers import safetensors
from pronk.checkpoint.tensors import SCORE
from pronk.checkpoint.writers import write
from pronk.engine.batch import PASS_TOKENS
from pronk.errors import BadFile, BadRequest, ContextOverflow, PronkError, Unsupported
from pronk.llm import LLM
from pronk.tokenizer.base import SpecialTokens
from pronk.torch_engine.backend import load_module
from pronk.torch_engine.model import Llama
from pronk.train import adapter as adapters
from pronk.train import lora
from pronk.train.data.batches import Batches
from pronk.train.data.containers import BadRecord
from pronk.train.data.examples import Encoder, Pair
from pronk.train.data.records import parse
from pronk.train.data.sources import prepare
from pronk.train.loop import Loop
from pronk.train.objectives.dpo import DPO
from pronk.train.objectives.reward import Reward, losses
from pronk.train.optimizers import make
from pronk.train.reward import padded, padding, with_score
from pronk.train.schedule import Schedule
from pronk.train.settings import Settings
from pronk.train.trainer import Trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT and transformers

CPU = torch.device("cpu")
LORA = LoraConfig(rank=4, alpha=8)
QUICK: dict[str, Any] = {
    "max_steps": 6, "accumulate": 2, "batch_size": 2, "eval_every": 3, "samples": 1, "device": "cpu", "threads": 1,
}  # fmt: skip
TEXTS = ["1 plus 2 is 3.", "1 plus 2 is 2 or so", "Who knows?", "a"]
TALK = [{"role": "user", "content": "Sing."}, {"role": "assistant", "content": "La la."}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers of unequal lengths, some with a margin."""
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"

    def answers(a: int, b: int) -> dict[str, Any]:
        margin = {"margin": 0.25 * b} if b % 2 else {}
        return {"chosen": f" {a + b}{'.' * b}", "rejected": f" {a * b} or so", **margin}

    return write_sums(path, answers)


@pytest.fixture(scope="module")
def full(folder: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a reward model all of whose weights were trained."""
    out = tmp_path_factory.mktemp("full") / "rm"
    pronk.reward(folder, data, out, full=True, lr=1e-3, **QUICK).run()
    return out / "model"


@pytest.fixture(scope="module")
def thin(folder: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an adapter."""
    out = tmp_path_factory.mktemp("thin") / "rm"
    pronk.reward(folder, data, out, lora_rank=4, lr=1e-2, **QUICK).run()
    return out


def encoder(folder: Path, **options: Any) -> Encoder:
    source = checkpoint.open(folder).tokenizer
    assert source
    return Encoder(tokenizer.load(source), 200, **options)


def pairs_of(folder: Path, data: Path) -> list[Pair]:
    own = encoder(folder)
    lines = data.read_text().splitlines()
    return [pair for line in lines for pair in Reward().encode(parse(json.loads(line), ""), own)]


def begun(folder: Path, seed: int = 0) -> checkpoint.Checkpoint:
    opened = checkpoint.open(folder)
    assert opened.tokenizer
    return with_score(opened, tokenizer.load(opened.tokenizer), seed)


# -- the loss --

REWARDS, MARGINS = [[1.5, -0.25], [0.5, 2.0], [-1.0, -1.0], [3.0, 2.75]], [0.0, 0.5, 0.0, 1.0]


@pytest.mark.parametrize("center", [0.0, 0.01])
def test_the_loss_is_its_formula(center: float) -> None:
    chosen, rejected = np.array(REWARDS).T
    expected = np.log1p(np.exp(-(chosen - rejected - MARGINS))) + center * (chosen + rejected) ** 2
    found = losses(torch.tensor(REWARDS, dtype=torch.float64), torch.tensor(MARGINS, dtype=torch.float64), center)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)


def oracle(path: Path, adapter: Path | None = None) -> Any:
    """transformers' model of a folder, or PEFT's of an adapter; in float32, to be trained."""
    from transformers import AutoModelForSequenceClassification

    options = {"num_labels": 1, "pad_token_id": 0} if adapter else {}
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32, **options)
    if adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(adapter), is_trainable=True)
    return model.eval()


def in_transformers(model: Any, texts: list[list[int]], pad: int = 0) -> torch.Tensor:
    """Scores of texts side by side, padded on the right."""
    width = max(map(len, texts))
    ids = torch.tensor([[*text, *[pad] * (width - len(text))] for text in texts])
    there = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in texts])
    scores: torch.Tensor = model(input_ids=ids, attention_mask=there).logits[:, 0]
    return scores


@pytest.mark.parametrize("center", [0.0, 0.1])
@pytest.mark.parametrize("config", [None, LORA], ids=["full", "lora"])
def test_loss_and_gradients_of_the_first_steps_are_transformers_own(
    folder: Path, data: Path, tmp_path: Path, config: LoraConfig | None, center: float
) -> None:
    """An independent loop: padded batches, transformers' forward pass, autograd, torch's AdamW."""
    pairs, source = pairs_of(folder, data), begun(folder)
    assert sum(pair.margin > 0 for pair in pairs) == 8
    model = load_module(source)
    if config:
        torch.manual_seed(1)
        lora.add(model, config)
        with torch.no_grad():
            for _, layer in lora.layers(model):
                layer.lora_B.normal_(0, 0.05)
        (tmp_path / "adapter").mkdir()
        adapters.save(model, config, str(folder), tmp_path / "adapter")
        other = oracle(folder, tmp_path / "adapter")
    else:
        write.save(source, tmp_path / "whole", to="safetensors", dtype="f32", tokenizer_files={})
        other = oracle(tmp_path / "whole")
    batches = Batches([len(pair) for pair in pairs], 4, seed=3)
    loop = Loop(
        model, pairs, batches, make(model, "adamw", 1e-3, 0.0), Schedule(1e-3, 9, 0, "constant"),
        objective=Reward(center_rewards=center), accumulate=2, clip=0.0,
    )  # fmt: skip
    seen: dict[str, torch.Tensor] = {}
    loop.optimizer.register_step_pre_hook(
        lambda *_: seen.update({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    )
    trained = {_ours(name): p for name, p in other.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    assert trained.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    order = [i for batch in batches.epoch(0) for i in batch]
    for number in range(2):
        chosen = [pairs[i] for i in order[8 * number : 8 * number + 8]]
        rewards = in_transformers(other, [a.ids.tolist() for pair in chosen for a in pair.answers.values()]).view(-1, 2)
        gap = rewards[:, 0] - rewards[:, 1] - torch.tensor([pair.margin for pair in chosen])
        loss = (-torch.nn.functional.logsigmoid(gap) + center * rewards.sum(-1) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        step = loop.step()
        assert step.targets == 8
        assert step.loss == pytest.approx(float(loss.detach()), rel=2e-5)
        right = float((rewards[:, 0] > rewards[:, 1]).float().mean())
        assert step.seen["rewards/accuracies"] == right
        for name, parameter in trained.items():
            scale = float(parameter.grad.abs().max())
            assert scale > 0
            # float32 rounds each of some hundred terms by 2^-24; what cancels between two answers is some times larger
            torch.testing.assert_close(seen[name], parameter.grad, rtol=2e-4, atol=2e-4 * scale, msg=name)
        optimizer.step()


def _ours(name: str) -> str:
    """A parameter of PEFT's, or of transformers', as ours is called."""
    name = name.removeprefix("base_model.model.").replace(".modules_to_save.default", "")
    return name.replace("lora_A.default.weight", "lora_A").replace("lora_B.default.weight", "lora_B")


# Loss, accuracy and margin of the first steps of TRL 1.16's RewardTrainer, transformers 5.23, float32.
TRL = [
    (0.8565472364425659, 0.5, 0.03164716064929962),
    (0.33933478593826294, 1.0, 1.2582100629806519),
    (0.1442040354013443, 1.0, 2.5508246421813965),
    (0.1176670640707016, 1.0, 3.3677189350128174),
]


class InOrder(Batches):
    def epoch(self, number: int) -> list[list[int]]:
        return [[*range(8)], [*range(8, 16)]]


def test_the_first_steps_are_trl_s(folder: Path) -> None:
    """Of 16 pairs, 8 a step, AdamW at 1e-3, center_rewards_coefficient 0.01."""
    own = encoder(folder)
    asked = [
        {"prompt": f"{a} plus {b} is", "chosen": f" {a + b}{'.' * b}", "rejected": f" {a * b} or so"}
        | {"margin": 0.25 * b * (b % 2)}
        for a in range(4)
        for b in range(4)
    ]
    pairs = [pair for raw in asked for pair in Reward().encode(parse(raw, ""), own)]
    model = load_module(begun(folder))
    loop = Loop(
        model, pairs, InOrder([len(pair) for pair in pairs], 8), make(model, "adamw", 1e-3, 0.0),
        Schedule(1e-3, 9, 0, "constant"), objective=Reward(center_rewards=0.01), clip=0.0,
    )  # fmt: skip
    for expected in TRL:
        step = loop.step()
        found = step.loss, step.seen["rewards/accuracies"], step.seen["rewards/margins"]
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_the_last_token_is_the_one(folder: Path, data: Path) -> None:
    """The inverse: were it the one before, as where a text ends with what is padded with, scores were others."""
    pair, model = pairs_of(folder, data)[3], load_module(begun(folder))
    ids = pair.chosen.ids.tolist()
    assert ids[-1] == 2
    assert pair.chosen.targets == 1
    assert pair.chosen.loss_mask[-1]
    _, seen = Reward().loss(model, Reward().collate([pair], CPU))
    with pronk.load(begun(folder)) as llm:
        assert seen["rewards/chosen"] == pytest.approx(llm.score(ids), abs=1e-5)
        assert abs(seen["rewards/chosen"] - llm.score(ids[:-1])) > 1e-2


# -- what is saved --


def text_ids(folder: Path, texts: list[str]) -> list[list[int]]:
    """As transformers' tokenizer has them, each with what ends a text."""
    from transformers import AutoTokenizer

    codec = AutoTokenizer.from_pretrained(folder)
    assert codec.pad_token_id == 0
    return [codec(text + codec.eos_token)["input_ids"] for text in texts]


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("engine", ["cpu", "torch"])
def test_transformers_and_peft_give_the_same_scores(
    kind: str, engine: Any, folder: Path, full: Path, thin: Path
) -> None:
    model = oracle(full) if kind == "full" else oracle(folder, thin)
    assert type(model if kind == "full" else model.base_model.model).__name__ == "LlamaForSequenceClassification"
    ids = text_ids(full if kind == "full" else thin, TEXTS)
    with torch.no_grad():
        expected = in_transformers(model, ids).tolist()
    llm = pronk.load(full, engine=engine) if kind == "full" else pronk.load(folder, adapter=thin, engine=engine)
    assert llm.score(TEXTS) == pytest.approx(expected, abs=1e-4)
    assert llm.score(ids) == llm.score(TEXTS)
    assert max(expected) - min(expected) > 1


def test_a_folder_of_transformers_own_is_read(folder: Path, tmp_path: Path) -> None:
    """Saved by save_pretrained, tied or not, of a Mistral too."""
    from transformers import (
        LlamaConfig,
        LlamaForSequenceClassification,
        MistralConfig,
        MistralForSequenceClassification,
    )

    sizes = {
        "vocab_size": 259, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_labels": 1, "pad_token_id": 0, "max_position_embeddings": 64,
    }  # fmt: skip
    kinds = [
        (LlamaForSequenceClassification, LlamaConfig(**sizes)),
        (LlamaForSequenceClassification, LlamaConfig(**sizes, tie_word_embeddings=True)),
        (MistralForSequenceClassification, MistralConfig(**sizes, sliding_window=None)),
    ]
    for number, (kind, config) in enumerate(kinds):
        torch.manual_seed(number)
        model = kind(config).eval()
        with torch.no_grad():
            model.score.weight.normal_(0, 1)
        model.save_pretrained(tmp_path / str(number))
        ids = [[1, 5, 6, 7, 2], [1, 9, 2]]
        with torch.no_grad():
            expected = in_transformers(model, ids).tolist()
        assert pronk.load(tmp_path / str(number)).score(ids) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8", "llm-int8"])
def test_it_is_written_in_other_formats(full: Path, tmp_path: Path, dtype: str) -> None:
    source = checkpoint.open(full)
    write.save(source, tmp_path / "other", to="safetensors", dtype=dtype)
    plain, other = (pronk.load(path, quantize="f32").score(TEXTS) for path in (full, tmp_path / "other"))
    assert other == pytest.approx(plain, abs=0 if dtype == "f32" else 0.3)
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    skipped = config.get("quantization_config", {})
    assert (skipped.get("ignore") or skipped.get("llm_int8_skip_modules") or ["score"]) == ["score"]
    for to, name in (("gguf", "GGUF"), ("llama2c", "llama2.c")):
        with pytest.raises(Unsupported, match=f"{name}.* no place for .*a reward model's score"):
            write.save(source, tmp_path / "x", to=to, dtype="f32")  # type: ignore[arg-type]


def test_what_is_padded_with_ends_no_text(full: Path, thin: Path) -> None:
    """Many models pad with what ends texts: then transformers scores the token before it."""
    for place in (full, thin):
        assert json.loads((place / "tokenizer_config.json").read_text())["pad_token"] == "<unk>"
    assert json.loads((full / "config.json").read_text())["pad_token_id"] == 0

    class Codec:
        def __init__(self, **ids: Any) -> None:
            vars(self).update(vars(SpecialTokens(frozenset(), **ids)))

        def token_text(self, token: int) -> str:
            return f"<{token}>"

    def of(**ids: Any) -> Any:
        return Codec(**ids)

    assert padding(of(pad_id=7, eos_ids=(2,))) == 7
    assert padding(of(pad_id=2, unk_id=0, bos_id=1, eos_ids=(2, 3))) == 0
    assert padding(of(pad_id=2, unk_id=3, bos_id=1, eos_ids=(2, 3))) == 1
    with pytest.raises(BadRequest, match="no token to pad with but those that end texts"):
        padding(of(pad_id=2, eos_ids=(2,), bos_id=2))
    other = {"special_tokens_map.json": b'{"pad_token": "</s>"}', "tokenizer.json": b"{}"}
    found = padded(other, of(pad_id=7, eos_ids=(2,)))
    assert found == {"tokenizer.json": b"{}", "tokenizer_config.json": b'{\n  "pad_token": "<7>"\n}\n'}
    kept = {"special_tokens_map.json": b'{"eos_token": "</s>"}'}
    assert padded(kept, of(pad_id=7, eos_ids=(2,))).items() > kept.items()
    assert "special_tokens_map.json" not in padded({"special_tokens_map.json": b"{"}, of(pad_id=7, eos_ids=(2,)))


def test_the_wrong_token_to_pad_with_would_be_seen(full: Path, tmp_path: Path) -> None:
    """The inverse: transformers with the end of texts as padding."""
    model = oracle(full)
    ids = text_ids(full, TEXTS)
    with torch.no_grad():
        good = in_transformers(model, ids)
        model.config.pad_token_id = 2
        bad = in_transformers(model, ids, pad=2)
    assert float((good - bad).abs().min()) > 1e-3


# -- scores --


WAYS: list[dict[str, Any]] = [
    {},
    {"quantize": "bf16"},
    {"quantize": "int8"},
    {"quantize": "llm-int8"},
    {"quantize": "q8"},
    {"quantize": "q4", "kv_dtype": "int8"},
    {"threads": 1},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_score_is_the_same_on_every_path(
    kind: str, way: dict[str, Any], folder: Path, full: Path, thin: Path
) -> None:
    """To the bit on the CPU engine: alone and among others, in one pass and in pieces."""
    draw = np.random.default_rng(0)
    texts = [draw.integers(3, 259, n).tolist() for n in (5, 1, PASS_TOKENS, 700, 64, 65, 300, 1024, 2)]
    way = {"engine": "cpu", **way}
    llm = pronk.load(full, **way) if kind == "full" else pronk.load(folder, adapter=thin, **way)
    together = llm.score(texts)
    assert isinstance(together, list)
    assert together == [llm.score(text) for text in texts]
    assert together[::-1] == llm.score(texts[::-1])
    from pronk.engine.batch import Batch, Run

    assert llm._score is not None
    for text, score in zip(texts, together, strict=True):
        whole = llm.backend.hidden(Batch.of([Run(text)]), None)  # without pieces
        every = llm.backend.hidden(Batch.of([Run(text, logits="all")]), None)
        assert whole[0].tobytes() == every[-1].tobytes()
        assert float((whole[0].astype(np.float64) * llm._score.astype(np.float64)).sum()) == score


@pytest.mark.parametrize("way", [{}, {"quantize": "bf16"}, {"quantize": "absmax"}, {"quantize": "int8"}], ids=str)
def test_on_the_torch_engine_to_rounding(full: Path, way: dict[str, Any]) -> None:
    draw = np.random.default_rng(0)
    texts = [draw.integers(3, 259, n).tolist() for n in (5, 700, 64, 300)]
    llm = pronk.load(full, engine="torch", device="cpu", **way)
    together = llm.score(texts)
    rough = 0.15 if way else 1e-5
    assert together == pytest.approx([llm.score(text) for text in texts], abs=rough)
    assert together == pytest.approx(pronk.load(full, quantize="f32").score(texts), abs=1.0 if way else 1e-4)


def test_texts_as_they_were_learned(full: Path, folder: Path) -> None:
    """A text is ended, a conversation is what the template makes of it, ids are what they are; one gives a number."""
    llm, codec = pronk.load(full), encoder(folder)
    pair = Reward().encode(parse({"prompt": "a", "chosen": "b", "rejected": "c"}, ""), codec)[0]
    assert llm.score("ab") == llm.score(pair.chosen.ids.tolist())
    assert llm.score("ab</s>") == llm.score("ab")
    asked = {"prompt": TALK[:1], "chosen": TALK[1:], "rejected": [{"role": "assistant", "content": "No."}]}
    of_talk = Reward().encode(parse(asked, ""), codec)[0]
    assert llm.score(TALK) == llm.score(of_talk.chosen.ids.tolist())
    assert llm.score([TALK, "ab", [3, 4]]) == [llm.score(TALK), llm.score("ab"), llm.score([3, 4])]
    assert isinstance(llm.score(["ab"]), list)
    assert llm.score([]) == []
    told: list[tuple[int, int]] = []
    llm.score(["ab", [3] * 600], progress=lambda name, done, total: told.append((done, total)))
    assert told == [(3, 603), (603, 603)]
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (path := full.parent / "template.jinja").write_text(template)
    assert llm.score(TALK, chat_template=path) == llm.score([codec.tokenizer.encode("Sing.La la.")])[0]
    with pytest.raises(BadRequest, match="a chat template is for messages"):
        llm.score("ab", chat_template=path)
    with pytest.raises(ContextOverflow):
        llm.score([5] * 1025)


REFUSED: dict[str, Callable[[LLM], Any]] = {
    "generate": lambda llm: llm.generate("a"),
    "stream": lambda llm: list(llm.stream("a")),
    "chat": lambda llm: llm.chat(TALK[:1]),
    "session": lambda llm: llm.session,
    "logits": lambda llm: llm.logits([3]),
    "cached logits": lambda llm: llm.logits([3], cache=True),
    "look": lambda llm: llm.look("a"),
    "to_torch": lambda llm: llm.to_torch(),
}


@pytest.mark.parametrize("engine", ["cpu", "torch"])
@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_it_predicts_no_tokens(full: Path, engine: Any, call: Callable[[LLM], Any]) -> None:
    llm = pronk.load(full, engine=engine)
    with pytest.raises(BadRequest, match=r"a reward model, .* predicts no tokens: llm\.score\(texts\), or pronk score"):
        call(llm)


def test_others_have_no_score(folder: Path, thin: Path) -> None:
    llm = pronk.load(folder)
    with pytest.raises(BadRequest, match="is no reward model: pronk reward makes one of it"):
        llm.score("a")
    with pytest.raises(BadRequest, match=r"changes score\.weight, of all texts; load the model with it"):
        llm.add_adapter(thin)


# -- hostile folders --


def edited(source: Path, destination: Path, changes: dict[str, Any], file: str = "config.json") -> Path:
    shutil.copytree(source, destination)
    raw = json.loads((destination / file).read_text()) | changes
    (destination / file).write_text(json.dumps({key: value for key, value in raw.items() if value != "absent"}))
    return destination


def with_tensors(source: Path, destination: Path, change: Callable[[dict[str, Any]], None], file: str) -> Path:
    shutil.copytree(source, destination)
    tensors = {name: tensor.read() for name, tensor in safetensors.read(source / file).items()}
    change(tensors)
    (destination / file).unlink()
    safetensors.write(destination / file, tensors)
    return destination


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id2label": {"0": "bad", "1": "good"}}, "num_labels=2 is not supported; only a reward model's 1 is"),
        ({"id2label": "absent"}, "num_labels=2 is not supported"),  # as transformers has it by default
        ({"id2label": "absent", "num_labels": 3}, "num_labels=3 is not supported"),
        ({"num_labels": 2}, "num_labels=2 is not supported"),  # beside one label
        ({"id2label": "absent", "num_labels": True}, "num_labels=True is not supported"),
        ({"id2label": ["a"]}, r"num_labels=\['a'\] is not supported"),
        ({"id2label": {}}, "num_labels=0 is not supported"),
    ],
    ids=str,
)
def test_other_labels_are_refused(full: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        checkpoint.open(edited(full, tmp_path / "x", changes))


def test_one_label_may_be_said_twice(full: Path, tmp_path: Path) -> None:
    for number, changes in enumerate([{"num_labels": 1}, {"num_labels": 1, "id2label": "absent"}]):
        assert checkpoint.open(edited(full, tmp_path / str(number), changes)).config.num_labels == 1


WRONG: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda t: t.update({SCORE: np.ones((2, 64), np.float32)}), r"shape \(2, 64\), but the config says \(1, 64\)"),
    (lambda t: t.update({SCORE: np.ones((1, 65), np.float32)}), r"shape \(1, 65\), but the config says \(1, 64\)"),
    (lambda t: t.update({SCORE: np.ones(64, np.float32)}), r"shape \(64,\), but the config says \(1, 64\)"),
    (lambda t: t.pop(SCORE), "score.weight.*absent"),
    (lambda t: t.update({"score.bias": np.ones(1, np.float32)}), "score.bias.*not part of this model"),
    (lambda t: t.update({"lm_head.weight": np.ones((259, 64), np.float32)}), "lm_head.weight.*not part of this model"),
    (lambda t: t.update({SCORE: np.full((1, 64), np.nan, np.float32)}), "score.weight.*holds infinity or NaN"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_score_that_is_none_is_refused(
    full: Path, tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    path = with_tensors(full, tmp_path / "x", change, "model.safetensors")
    with pytest.raises(BadFile, match=message):
        pronk.load(path)


KEY = "base_model.model.score.weight"
WRONG_ADAPTERS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda t: t.update({KEY: np.ones((2, 64), np.float32)}), r"shape \(2, 64\), but this model wants \(1, 64\)"),
    (lambda t: t.update({KEY: np.ones((1, 32), np.float32)}), r"shape \(1, 32\), but this model wants \(1, 64\)"),
    (lambda t: t.pop(KEY), "score.weight.*absent, which adapter_config.json says was trained"),
    (lambda t: t.update({KEY: np.full((1, 64), np.inf, np.float32)}), "score.weight.*holds infinity or NaN"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_ADAPTERS, ids=[message for _, message in WRONG_ADAPTERS])
def test_an_adapter_s_score_that_is_none_is_refused(
    folder: Path, thin: Path, tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    path = with_tensors(thin, tmp_path / "x", change, "adapter_model.safetensors")
    with pytest.raises(BadFile, match=message):
        pronk.load(folder, adapter=path)


def test_an_adapter_must_name_its_score(folder: Path, thin: Path, tmp_path: Path) -> None:
    path = edited(thin, tmp_path / "x", {"modules_to_save": None}, "adapter_config.json")
    with pytest.raises(BadFile, match=r"score\.weight.*belongs to no module of this model"):
        pronk.load(folder, adapter=path)
    as_peft = edited(thin, tmp_path / "peft", {"modules_to_save": ["classifier", "score"]}, "adapter_config.json")
    assert pronk.load(folder, adapter=as_peft).score("a") == pronk.load(folder, adapter=thin).score("a")


# -- data --


def test_margins(folder: Path) -> None:
    own, pair = encoder(folder), {"prompt": "a", "chosen": "b", "rejected": "c"}
    orca = {"question": "a", "chosen": "b", "rejected": "c", "margin": 2}
    three = pair, {**pair, "margin": 1.5}, orca
    assert [Reward().encode(parse(raw, ""), own)[0].margin for raw in three] == [0, 1.5, 2]
    for bad in (-1, "1", True, float("nan"), float("inf"), [1], 1e7):
        with pytest.raises(BadRecord, match=r"margin must be a number from 0 to 1e\+06, not "):
            parse({**pair, "margin": bad}, "")
    assert not own.unused
    DPO().encode(parse({**pair, "margin": 1.5}, ""), own)
    assert own.unused == {"margin": 1}  # which is told


def test_settings_out_of_range() -> None:
    for bad in (-1.0, float("nan"), 1e10):
        with pytest.raises(BadRequest, match="center_rewards must be from 0 to 1e"):
            Reward(center_rewards=bad)


# -- runs --


def run_of(chosen: Settings, out: Path) -> Trainer:
    """A run on a model with a score head that is drawn."""
    source = begun(Path(chosen.model), chosen.seed)
    assert source.tokenizer
    ready = prepare(chosen, tokenizer.load(source.tokenizer), source.config.max_position_embeddings)
    out.mkdir(exist_ok=True)
    return Trainer(source, ready, chosen, out, tokenizer_files={}, device="cpu")


def settings(model: Path, data: Path, **changes: Any) -> Settings:
    dropping = replace(LORA, dropout=0.2)
    base = Settings(str(model), str(data), lora=dropping, max_steps=6, batch_size=2, accumulate=2, lr=1e-2)
    return replace(base, **{"eval_every": 3, "save_every": 3, "objective": Reward(), **changes})


@pytest.mark.parametrize("config", [LORA, None], ids=["lora", "full"])
def test_resumed_is_as_if_never_stopped(folder: Path, data: Path, tmp_path: Path, config: LoraConfig | None) -> None:
    dropping = replace(config, dropout=0.2) if config else None
    chosen = settings(folder, data, lora=dropping, lr=1e-2 if config else 1e-3)
    assert run_of(chosen, tmp_path / "whole").train()
    calls = count()
    assert not run_of(chosen, tmp_path / "parts").train(stop=lambda: next(calls) == 4)
    again = run_of(chosen, tmp_path / "parts")
    torch.manual_seed(77)  # another process has another state
    again.resume()
    assert again.loop.position.step == 4
    assert again.train()
    assert timeless(tmp_path / "parts") == timeless(tmp_path / "whole")
    every = [path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("*.safetensors")]
    results = [path for path in every if "checkpoints" not in path.parts]  # which were made at other steps
    assert results
    assert all((tmp_path / "parts" / path).read_bytes() == (tmp_path / "whole" / path).read_bytes() for path in results)


def test_a_run_knows_its_margins_and_its_head(folder: Path, data: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.jsonl"
    own.write_text(data.read_text())
    run_of(settings(folder, own), tmp_path / "run").train(stop=lambda: True)
    assert '"margin": 0.25' in own.read_text()
    own.write_text(own.read_text().replace('"margin": 0.25', '"margin": 0.5'))
    with pytest.raises(BadRequest, match="was made with other examples: what their name stands for has"):
        run_of(settings(folder, own), tmp_path / "run").resume()
    own.write_text(data.read_text())
    with pytest.raises(BadRequest, match=r"made with center_rewards=0\.0, and now it is 0\.1; resume"):
        run_of(settings(folder, own, objective=Reward(center_rewards=0.1)), tmp_path / "run").resume()
    heads = [begun(folder, seed).tensors[SCORE].read() for seed in (0, 0, 1)]
    assert np.array_equal(heads[0], heads[1])
    assert not np.array_equal(heads[0], heads[2])
    assert heads[0].shape == (1, 64)


@pytest.mark.parametrize("ways", [{"size": 1, "accumulate": 16}, {"size": 4, "accumulate": 4}, {"pack": 120}])
def test_however_pairs_are_dealt_out(folder: Path, data: Path, ways: dict[str, Any]) -> None:
    pairs = pairs_of(folder, data)[:16]

    def one(size: int = 1, pack: int | None = None, accumulate: int | None = None) -> tuple[float, dict[str, Any]]:
        model: Llama = load_module(begun(folder))
        batches = Batches([len(pair) for pair in pairs], size, pack, seed=3)
        of = accumulate or len(batches.epoch(0))
        loop = Loop(model, pairs, batches, make(model, "adamw", 1e-3, 0.0), Schedule(1e-3, 1, 0), objective=Reward(),
                    accumulate=of, clip=0.0)  # fmt: skip
        found: dict[str, Any] = {}
        loop.optimizer.register_step_pre_hook(
            lambda *_: found.update({name: p.grad.clone() for name, p in model.named_parameters()})
        )
        return loop.step().loss, found

    (whole, expected), (loss, found) = one(size=16), one(**ways)
    assert loss == pytest.approx(whole, abs=1e-6)
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-4 * float(grad.abs().max()))


def test_a_second_round(folder: Path, data: Path, full: Path, thin: Path, tmp_path: Path) -> None:
    """A reward model keeps its head where it goes on; an adapter of one goes on, and one of a model that generates
    begins one; nothing else goes on from a reward model."""
    quick = {**QUICK, "max_steps": 1, "samples": 0}
    first = pronk.reward(full, data, tmp_path / "a", full=True, lr=1e-9, **quick).run()
    assert first.model_folder
    heads = [checkpoint.open(path).tensors[SCORE].read() for path in (full, Path(first.model_folder))]
    np.testing.assert_allclose(heads[1], heads[0], atol=1e-7)
    pronk.reward(folder, data, tmp_path / "b", from_adapter=thin, lr=1e-9, **quick).run()
    scores = [pronk.load(folder, adapter=path).score(TEXTS) for path in (thin, tmp_path / "b")]
    assert scores[1] == pytest.approx(scores[0], abs=1e-4)
    sums = write_sums(tmp_path / "sums.jsonl", lambda a, b: {"completion": f" {a + b}."})
    pronk.finetune(folder, sums, tmp_path / "tuned", lora_rank=4, **quick).run()
    pronk.reward(folder, data, tmp_path / "c", from_adapter=tmp_path / "tuned", lr=1e-9, **quick).run()
    with pytest.raises(BadFile, match="it is a reward model's adapter: pronk reward goes on from it"):
        pronk.finetune(folder, sums, tmp_path / "d", from_adapter=thin, **quick).run()
    for verb, source in ((pronk.finetune, sums), (pronk.dpo, data)):
        with pytest.raises(BadRequest, match="is a reward model, which predicts no tokens; train the model"):
            verb(full, source, tmp_path / "e", **quick).run()  # type: ignore[operator]
    # beside a reward model an adapter has a head of its own, too
    pronk.reward(full, data, tmp_path / "f", lora_rank=2, lr=1e-2, **quick).run()
    beside = pronk.load(full, adapter=tmp_path / "f")
    merged = pronk.load(full, adapter=tmp_path / "f", merge_adapter=True, quantize="f32")
    assert beside.score(TEXTS) == pytest.approx(merged.score(TEXTS), abs=1e-4)
    assert beside.score(TEXTS) != pytest.approx(pronk.load(full).score(TEXTS), abs=1e-4)


def test_16_bits_and_frozen_codes(folder: Path, data: Path, tmp_path: Path) -> None:
    """The head stays float32, and learns."""
    for number, options in enumerate([{"precision": "bf16"}, {"quantize": "q8"}, {"optimizer": "adamw8bit"}]):
        out = tmp_path / str(number)
        result = pronk.reward(folder, data, out, lora_rank=4, lr=1e-2, **options, **QUICK).run()  # type: ignore[arg-type]
        assert result.loss["last"] < result.loss["first"]
        saved = safetensors.read(out / "adapter_model.safetensors")[KEY].read()
        drawn = begun(folder).tensors[SCORE].read()
        assert saved.dtype == np.float32
        assert 1e-3 < np.abs(saved - drawn).max() < 0.2


def test_what_python_is_told(folder: Path, data: Path, tmp_path: Path) -> None:
    run = pronk.reward(folder, data, tmp_path / "out", lora_rank=4, lr=1e-2, **QUICK)
    assert run.plan().fits
    lines = list(run)
    names = {"rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"}
    assert {f"held_out_{name}" for name in names} < lines[0].keys()
    assert names < lines[1].keys()
    result = run.result
    assert result.held_out_rewards
    assert result.held_out_rewards["accuracy"] == 1
    (sample,) = result.samples
    assert list(sample) == ["prompt", "chosen", "rejected"]
    llm = pronk.load(folder, adapter=tmp_path / "out")
    score, text = sample["chosen"].split("  ", 1)
    assert llm.score(f"{sample['prompt']}{text}") == pytest.approx(float(score), abs=1e-3)
    assert float(score) > float(sample["rejected"].split("  ", 1)[0])


def test_a_score_that_is_no_number(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = pronk.load(full)
    monkeypatch.setattr(llm.backend, "hidden", lambda batch, kv: np.full((2, 64), np.nan, np.float32))
    with pytest.raises(PronkError, match="the score of text 1 is not a number"):
        llm.score(["a", "b"])


# -- what it learns --


def test_held_out_pairs_are_told_apart(tmp_path: Path) -> None:
    """llama2.c's model of 260K parameters learns to like sentences better than the same words in another order, and of
    sentences that it never saw, too. (0.5 is chance; before training a head that is drawn has some opinion.)"""
    stories = Path(__file__).parents[3] / "shared" / "data" / "stories260K"
    if not stories.exists():
        pytest.skip(f"{stories} is absent")
    names, things = ("Lily", "Tom", "Ben", "Mia", "Sam", "Anna"), ("ball", "dog", "cake", "hat", "car", "bird")
    draw, lines = np.random.default_rng(0), []
    for name in names:
        for thing in things:
            words = f"wanted to play with the {thing} and was very happy".split()
            at = int(draw.integers(1, len(words) - 1))
            swapped = [*words[:at], words[at + 1], words[at], *words[at + 2 :]]  # two neighbours
            answers = {"chosen": f" {' '.join(words)}.", "rejected": f" {' '.join(swapped)}."}
            lines.append(json.dumps({"prompt": f"There was a child named {name}. {name}", **answers}))
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    run = pronk.reward(
        stories / "stories260K.bin", tmp_path / "pairs.jsonl", tmp_path / "rm", tokenizer=stories / "tok512.bin",
        full=True, lr=1e-3, max_steps=12, accumulate=1, batch_size=6, eval_every=4, eval_share=0.5, samples=0,
        device="cpu", threads=1,
    )  # fmt: skip
    right = [line["held_out_rewards/accuracies"] for line in run if "held_out_loss" in line]
    assert right[0] <= 0.75
    assert run.result.held_out_rewards
    assert run.result.held_out_rewards["accuracy"] >= 0.9
    assert max(right) == run.result.held_out_rewards["accuracy"] or right[-1] >= 0.9
    llm = pronk.load(tmp_path / "rm" / "model")  # with the tokenizer that was named
    pairs = run.data.held_out
    scores = np.array(llm.score([answer.ids.tolist() for pair in pairs for answer in pair.answers.values()]))
    assert float((scores[::2] > scores[1::2]).mean()) == run.result.held_out_rewards["accuracy"]
