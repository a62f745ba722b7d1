"""Users of other projects: their commands run, or one line names what pronk has instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tiny_folder import save_tiny_chat_model

import pronk
from pronk import spellings
from pronk.cli import group, llama2c
from pronk.errors import BadRequest

GOLDENS = Path(__file__).parent / "goldens" / "llama2c"


def run(*arguments: str, input: str | None = None) -> Result:
    return CliRunner().invoke(group, list(arguments), input=input, prog_name="pronk")


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(save_tiny_chat_model(tmp_path / "tiny"))


@pytest.fixture
def files(data: Path) -> tuple[str, str]:
    folder = data / "stories260K"
    return str(folder / "stories260K.bin"), str(folder / "tok512.bin")


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ("-t 0.8 -p 0.9 -s 1 -n 120", "t0.8-p0.9-s1-n120"),
        ("-t 1.0 -p 0 -s 42 -n 200", "t1.0-p1.0-s42-n200"),
        ("-s 42 -n 200", "t1.0-p0.9-s42-n200"),  # its defaults
        ("-t 0 -n 200", "greedy-n200"),
        ("0.8 120 -s 1", "t0.8-p0.9-s1-n120"),
        ("0.0 200", "greedy-n200"),
    ],
)
def test_llama2_c_s_command_line_prints_what_llama2_c_prints(files: tuple[str, str], arguments: str, name: str) -> None:
    done = run(files[0], *arguments.split(), "-z", files[1])
    assert done.exit_code == 0, done.stderr
    assert done.stdout == (GOLDENS / f"{name}.txt").read_text()


def test_llama2_c_s_prompt(files: tuple[str, str]) -> None:
    """Of which it prints both prompt and story; 100 steps are the prompt's 8 tokens and 92 more."""
    golden = (GOLDENS / "greedy-lily-n100.txt").read_text().removesuffix("\n")
    for order in (["-t", "0", "-n", "99", "-i", "One day, Lily met"], ["0", "99", "One day, Lily met"]):
        done = run(files[0], *order)
        assert done.stdout.startswith(golden[:200]), done.stderr
    assert run(files[0], "0", "9", "One day, Lily met").stdout.startswith("One day, Lily met")
    assert run(files[0], "One day, Lily met").stdout.startswith("One day, Lily met")


def test_llama2_c_s_chat_and_what_it_means() -> None:
    chat = llama2c.translated(["m.bin", "-m", "chat", "-y", "Be kind.", "-n", "0"])
    assert chat[:5] == ["chat", "-m", "m.bin", "-n", "-1"]
    assert "--system Be kind. --chat-template llama2" in " ".join(chat)
    defaults = "generate -m m.bin -n 256 --rng xorshift --temperature 1.0 --top-p 0.9 --echo --prompt"
    assert llama2c.translated(["m.bin"]) == [*defaults.split(), ""]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("absent.bin 0.8", "absent.bin: no such file or folder"),
        ("m.bin --json", "--json: pronk MODEL takes llama2.c's options, -t -p -s -n -i -z -m -y, each with a value"),
        ("m.bin one two", "two: a second prompt; what has spaces goes in quotes"),
        ("m.bin -m other", "-m other: llama2.c's modes are generate and chat"),
        ("m.bin -m chat -i hello", "-i is for texts"),
        ("m.bin -y hello", "-y is for -m chat"),
        ("m.bin -t", "-t: pronk MODEL takes"),
    ],
)
def test_what_llama2_c_has_not(arguments: str, said: str) -> None:
    done = run(*arguments.split())
    assert (done.exit_code != 0, done.stdout) == (True, "")
    assert said in done.stderr


def test_a_prompt_that_ends_like_a_file_is_a_prompt() -> None:
    assert not llama2c.is_model("Tell me about stories15M.bin")
    assert not llama2c.is_model("x" * 5000 + " y")
    assert llama2c.is_model("stories15M.bin")


def test_meta_s_and_others_options_work(model: str) -> None:
    plain = run("generate", "-m", model, "-c", "64", "-n", "5", "--temperature", "0.7", "--top-p", "0.9", "-s1", "Hi")
    assert plain.exit_code == 0, plain.stderr
    for theirs in (
        f"--ckpt_dir {model} --tokenizer_path {model} --max_seq_len 64 --max_gen_len 5 --temperature 0.7 --top_p 0.9",
        f"--model-path {model} -z {model} --n-ctx 64 --steps=5 --temp 0.7 --topp 0.9 --n_threads 1",
        f"--model_name_or_path {model} --max_model_len 64 --n_predict 5 --temp 0.7 --top-p 0.9",
    ):
        done = run("generate", *theirs.split(), "-s1", "Hi")
        assert (done.exit_code, done.stdout) == (0, plain.stdout), done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("generate --load_in_8bit x", "no option --load_in_8bit; --quantize llm-int8 does that"),
        ("generate --dtype bf16 x", "no option --dtype; --quantize is f32, bf16 or f16"),
        ("generate --load-in-4bit x", "no option --load-in-4bit; --quantize q4 does that"),
        ("generate --device_map auto x", "no option --device_map; --device is cpu, cuda or cuda:N"),
        ("generate --max_batch_size 4 x", "no option --max_batch_size; as many texts go side by side as fit"),
        ("generate --n-gpu-layers 99 x", "no option --n-gpu-layers; --device cuda puts the whole model there"),
        ("generate --trust-remote-code x", "no option --trust-remote-code; no code of a repository is ever run"),
        ("inspect -m x", "no option -m; the model is an argument: pronk inspect MODEL"),
        ("verify --ckpt_dir x", "no option --ckpt_dir; the model is an argument: pronk verify MODEL"),
    ],
)
def test_others_options_name_ours(arguments: str, said: str) -> None:
    done = run(*arguments.split())
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 2


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: pronk.load("x", load_in_8bit=True), r"load\(\) has no load_in_8bit=; quantize='llm-int8' does that"),
        (lambda: pronk.load("x", device_map="auto"), r"no device_map=; device= is cpu, cuda or cuda:N"),
        (lambda: pronk.load("x", torch_dtype="auto"), "quantize= is f32, bf16 or f16"),
        (lambda: pronk.load("x", max_seq_len=512), "max_seq_len=; ctx_size= is its name here"),
        (lambda: pronk.load(ckpt_dir="x"), "ckpt_dir=; model= is its name here"),
        (lambda: pronk.load("x", trust_remote_code=True), "no code of a repository is ever run"),
    ],
)
def test_others_keywords_name_ours(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        call()


def test_others_sampling_names_ours(model: str) -> None:
    llm = pronk.load(model, threads=1)
    for option, said in (("max_gen_len", "max_new_tokens= is its name here"), ("do_sample", "temperature= over 0")):
        with pytest.raises(BadRequest, match=f"unknown option '{option}'; {said}"):
            llm.generate("Hi", **{option: 1})
    with pytest.raises(BadRequest, match="unknown option 'max_new_token'; did you mean max_new_tokens"):
        llm.generate("Hi", max_new_token=1)


def test_a_keyword_of_nobody_s_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'frobnicate'"):
        pronk.load("x", frobnicate=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="argument 'quantise'; did you mean quantize=\\?"):
        pronk.load("x", quantise="q4")  # type: ignore[call-arg]


def test_what_is_named_is_there() -> None:
    there = {*inspect.signature(pronk.load).parameters, *(field.name for field in fields(pronk.SamplingParams))}
    named = {*spellings.SAME.values(), *(i.option for i in spellings.INSTEAD.values() if i.option)}
    assert named <= there
    assert not there & {*spellings.SAME, *spellings.INSTEAD}
