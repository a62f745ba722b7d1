"""An adapter's folder keeps tokenizer and chat template, as TRL's does: transformers, PEFT and pronk use it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tiny_folder import CHAT_TEMPLATE, save_tiny_chat_model
from training_runs import write_sums

import pronk
from pronk.checkpoint import adapter
from pronk.cli import group
from pronk.train.folder import CHECKPOINTS
from pronk.train.objectives.sft import alpaca_prompt

QUICK: dict[str, Any] = {"max_steps": 2, "lora_rank": 2, "lr": 0.01, "samples": 0, "device": "cpu", "threads": 1}
TEXT = "3 plus 4 is 7. </s>Über<s>"
TALK = [{"role": "user", "content": "Sing."}]


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(group, list(arguments), prog_name="pronk")
    assert result.exit_code == 0, result.stderr
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=256)


@pytest.fixture(params=["a folder of Hugging Face's", "a folder with a file for the template", "GGUF", "no settings"])
def model(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Path:
    if request.param == "GGUF":
        run("convert", str(folder), str(tmp_path / "m.gguf"), "--to", "gguf")
        return tmp_path / "m.gguf"
    own = save_tiny_chat_model(tmp_path / "tiny", max_position_embeddings=256)
    if request.param == "a folder with a file for the template":
        settings = json.loads((own / "tokenizer_config.json").read_text())
        (own / "chat_template.jinja").write_text(settings.pop("chat_template"))
        (own / "tokenizer_config.json").write_text(json.dumps(settings))
    if request.param == "no settings":
        (own / "tokenizer_config.json").unlink()
        (own / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return own


def bare(path: Path) -> Path:
    return write_sums(path, lambda a, b: {"completion": f" {a + b}."})


def instructions(path: Path) -> Path:
    path.write_text('{"instruction": "Sing.", "output": "La"}\n')
    return path


@pytest.mark.parametrize("records", [bare, instructions])
def test_transformers_reads_the_base_model_s_tokenizer_from_it(
    model: Path, tmp_path: Path, records: Callable[[Path], Path]
) -> None:
    from transformers import AutoTokenizer

    result = pronk.finetune(model, records(tmp_path / "d.jsonl"), tmp_path / "out", **QUICK).run()
    assert result.adapter
    base = pronk.load(model)
    for place in (Path(result.adapter), tmp_path / "out" / CHECKPOINTS / "step-000002"):
        theirs = AutoTokenizer.from_pretrained(place)
        assert theirs.encode(TEXT, add_special_tokens=False) == base.tokenizer.encode(TEXT, bos=False, special=True)
        said = theirs.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
        assert said == "<s>user:Sing.</s><s>assistant:"
        assert adapter.read_config(place)[0].rank == 2


def test_the_template_that_was_trained_through_is_the_only_one(model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    out = tmp_path / "out"
    pronk.finetune(model, instructions(tmp_path / "d.jsonl"), out, **QUICK, instructions="alpaca").run()
    said = AutoTokenizer.from_pretrained(out).apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    assert said == alpaca_prompt({"instruction": "Sing."})
    llm = pronk.load(model, adapter=out)
    assert llm.chat_prompt(TALK) == llm.tokenizer.encode(said, bos=False)


@pytest.mark.parametrize("records", [bare, instructions])
def test_pronk_takes_the_base_model_s_tokenizer_or_the_folder_s(
    model: Path, tmp_path: Path, records: Callable[[Path], Path]
) -> None:
    out = str(tmp_path / "out")
    pronk.finetune(model, records(tmp_path / "d.jsonl"), out, **QUICK).run()
    given = ["generate", "-m", str(model), "--adapter", out, "-n", "8"]
    own, named = (run(*given, *more, "3 plus 4 is") for more in ((), ("--tokenizer", out)))
    assert own.stdout == named.stdout
    assert ("bare text" in own.stderr) is (records is instructions)
    assert run(*given, "--chat", "Sing.").stdout == run(*given, "--tokenizer", out, "--chat", "Sing.").stdout


def test_dpo_keeps_them_and_another_tokenizer_than_the_model_s(folder: Path, tmp_path: Path) -> None:
    """The one that was named."""
    from transformers import AutoTokenizer

    other = save_tiny_chat_model(tmp_path / "other", max_position_embeddings=256)
    settings = json.loads((other / "tokenizer_config.json").read_text())
    settings["chat_template"] = CHAT_TEMPLATE.replace("assistant", "model")
    (other / "tokenizer_config.json").write_text(json.dumps(settings))
    data = write_sums(tmp_path / "d.jsonl", lambda a, b: {"chosen": f" {a + b}.", "rejected": " no"})
    pronk.dpo(folder, data, tmp_path / "out", tokenizer=other, **QUICK).run()
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True).endswith("<s>model:")
    # Bare texts were learned: what pronk asks through is the model's own template, whoever's the folder's is.
    llm = pronk.load(folder, adapter=tmp_path / "out")
    assert llm.tokenizer.decode(llm.chat_prompt(TALK)).endswith("assistant:")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT's own, of transformers
def test_peft_and_transformers_answer_as_pronk_does(folder: Path, tmp_path: Path) -> None:
    """From the adapter's folder alone: the base model's name and the tokenizer stand in it."""
    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer

    out = tmp_path / "out"
    pronk.finetune(folder, instructions(tmp_path / "d.jsonl"), out, **QUICK).run()
    theirs = AutoPeftModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    codec = AutoTokenizer.from_pretrained(out)
    ids = codec.apply_chat_template(TALK, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]
    llm = pronk.load(folder, adapter=out)
    assert ids[0].tolist() == llm.chat_prompt(TALK)
    with torch.no_grad():
        expected = theirs(ids).logits[0].numpy()
    assert abs(llm.logits(ids[0].tolist()) - expected).max() < 1e-4
