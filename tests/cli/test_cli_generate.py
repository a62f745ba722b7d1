"""Whole transcripts of `pronk generate`, with a model whose answers are known beforehand."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from click.testing import Result
from fake_llm import FakeLLM

from pronk.cli import console

Run = Callable[..., Result]
STATISTICS = "3 prompt tokens at 12.0 tok/s; 2 new at 40.0 tok/s; first after 0.25 s, loaded in 1.50 s; peak 512 MB; "
STOPPED = "stopped after 2 tokens; -n allows more\n"


def test_text_to_stdout_statistics_to_stderr(run: Run, loaded: list[FakeLLM]) -> None:
    result = run("generate", "-n", "2", "one two three")
    assert result.exit_code == 0
    assert result.stdout == "word0 word1 \n"
    assert result.stderr == STATISTICS + "greedy\n" + STOPPED


def test_the_full_context_is_no_matter_of_n(run: Run, loaded: list[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    full = "stopped, for the context of 64 tokens is full"
    assert run("generate", "-n", "61", "one two three").stderr.splitlines()[-1] == full
    monkeypatch.setattr(FakeLLM.config, "max_position_embeddings", 1024)
    assert (
        run("generate", "-n", "61", "one two three").stderr.splitlines()[-1] == full + "; --ctx-size allows up to 1024"
    )
    assert "stopped" in run("generate", "-n", "60", "one two three").stderr


def test_the_effective_sampling_is_reported(run: Run, loaded: list[FakeLLM]) -> None:
    result = run(*"generate -n 2 --temp 0.8 --top-k 40 --top-p 0.95 --rng numpy -s 42".split(), "one two three")
    assert result.stderr == STATISTICS + "temperature 0.8, top-k 40, top-p 0.95, seed 42 (numpy)\n" + STOPPED


def test_every_option_reaches_the_library(run: Run, loaded: list[FakeLLM]) -> None:
    options = (
        "-m some/model --tokenizer tok.bin --adapter mine --merge-adapter --revision v1 --threads 3 -c 99 "
        "--engine torch --quantize q4 --int8-threshold 5 --int8-outliers 4 --kv-dtype int8 "
        "--device cuda:1 --compute-dtype bf16 --attn math --batch-invariant --no-pack-cache "
        "--max-new-tokens 5 --temperature 0.5 --top-k 4 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.5 "
        "--presence-penalty 0.25 --frequency-penalty 0.75 --logit-bias 7=-5 --logit-bias 8=2.5 --seed 9 --rng xorshift "
        "--stop END --stop STOP --stop-token-id 3 --ignore-eos --num-samples 2 "
        "--logprobs 1 --speculative ngram --no-cache --truncate left"
    )
    result = run("generate", *options.split(), "-p", "hello there")
    assert result.exit_code == 0, result.stderr
    (llm,) = loaded
    progress = llm.loading.pop("progress")
    assert callable(progress)
    assert llm.loading == {
        "model": "some/model",
        "tokenizer": "tok.bin",
        "adapter": "mine",
        "merge_adapter": True,
        "revision": "v1",
        "engine": "torch",
        "quantize": "q4",
        "int8_threshold": 5.0,
        "int8_outliers": 4,
        "kv_dtype": "int8",
        "device": "cuda:1",
        "compute_dtype": "bf16",
        "attn": "math",
        "batch_invariant": True,
        "threads": 3,
        "ctx_size": 99,
        "pack_cache": False,
    }
    (call,) = llm.calls
    params = call.pop("params")
    assert call == {"prompt": "hello there", "truncate": "left", "cache": False}
    assert {name: getattr(params, name) for name in params.__dataclass_fields__} == {
        "max_new_tokens": 5,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.25,
        "frequency_penalty": 0.75,
        "logit_bias": {7: -5.0, 8: 2.5},
        "seed": 9,
        "rng": "xorshift",
        "stop": ("END", "STOP"),
        "stop_token_ids": (3,),
        "ignore_eos": True,
        "num_samples": 2,
        "n": 1,
        "num_beams": 1,
        "length_penalty": 1.0,
        "early_stopping": False,
        "num_return_sequences": 1,
        "logprobs": 1,
        "speculative": "ngram",
    }


def test_nothing_asked_for_is_nothing_passed(run: Run, loaded: list[FakeLLM]) -> None:
    assert run("generate", "x").exit_code == 0
    (llm,) = loaded
    given = {name: value for name, value in llm.loading.items() if name != "progress" and value is not None}
    assert given == {"model": "smollm2:135m", "pack_cache": True}  # which a library does where it is asked to


@pytest.mark.parametrize(
    ("typed", "seen"),
    [
        ("a prompt", "a prompt"),
        ("a prompt\n", "a prompt"),
        ("a prompt\r\n", "a prompt"),
        ("two\n\n", "two\n"),
        ("\ufeffa prompt\n", "a prompt"),
        ("\ufeff\ufeffa", "\ufeffa"),
        ("", ""),
        ("ünï\0cödé", "ünï\0cödé"),
    ],
)
@pytest.mark.parametrize("way", ["stdin", "dash", "argument", "file"])
def test_prompts_from_elsewhere(
    run: Run, loaded: list[FakeLLM], tmp_path: Path, typed: str, seen: str, way: str
) -> None:
    raw = typed.encode()
    if way == "file":
        (tmp_path / "prompt.txt").write_bytes(raw)
        result = run("generate", "-n1", "-f", str(tmp_path / "prompt.txt"))
    else:
        result = run("generate", "-n1", *{"stdin": [], "dash": ["-f", "-"], "argument": ["-"]}[way], input=raw)
    assert result.exit_code == 0, result.stderr
    assert loaded[0].calls[0]["prompt"] == seen


def test_a_dash_by_name_is_a_prompt(run: Run, loaded: list[FakeLLM]) -> None:
    run("generate", "-n1", "-p", "-", input="not read")
    assert loaded[0].calls[0]["prompt"] == "-"


def test_minus_one_new_tokens_reach_to_the_end_of_the_context(run: Run, model: str) -> None:
    for given in (["-n", "-1"], ["-n-1"], ["--max-new-tokens=-1"]):
        result = run("generate", "-m", model, "-c", "64", *given, "--ignore-eos", "--json", "Hello")
        found = json.loads(result.stdout)
        assert found["prompt_tokens"] + len(found["tokens"]) == 64
        assert found["finish_reason"] == "length"
    chat = run("chat", "-m", model, "-c", "64", "-n", "-1", "--ignore-eos", input="hi\n")
    assert "the context of 64 tokens is full" in chat.stderr


def test_a_prompt_may_be_empty(run: Run, loaded: list[FakeLLM]) -> None:
    assert run("generate", "", "-n1", input="not read").stdout == "word0 \n"
    assert loaded[0].calls[0]["prompt"] == ""


@pytest.mark.parametrize("way", ["stdin", "file"])
def test_what_is_no_text_is_refused(run: Run, loaded: list[FakeLLM], tmp_path: Path, way: str) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"caf\xe9")
    name = "standard input" if way == "stdin" else path
    result = run("generate", *([] if way == "stdin" else ["-f", str(path)]), input=b"caf\xe9")
    assert (result.exit_code, result.stdout, loaded) == (1, "", [])
    assert result.stderr == f"pronk: {name}: not UTF-8 text (byte 3); convert it first\n"


def test_files_that_cannot_be_read(run: Run, loaded: list[FakeLLM], tmp_path: Path) -> None:
    result = run("generate", "-f", str(tmp_path / "absent"))
    assert (result.exit_code, result.stderr) == (1, f"pronk: {tmp_path / 'absent'}: No such file or directory\n")
    result = run("generate", "-f", str(tmp_path))
    assert (result.exit_code, result.stderr) == (1, f"pronk: {tmp_path}: Is a directory\n")


def test_json_is_one_object_and_nothing_else(run: Run, loaded: list[FakeLLM]) -> None:
    result = run("generate", "-n", "2", "--json", "-m", "org/name", "één twee drie")
    assert result.stdout.count("\n") == 1
    assert result.stderr == ""
    assert json.loads(result.stdout) == {
        "model": "org/name",
        "prompt": "één twee drie",
        "prompt_tokens": 3,
        "text": "word0 word1 ",
        "tokens": [0, 1],
        "finish_reason": "length",
        "seed": 1234,
        "stats": {
            "load_s": 1.5,
            "ttft_s": 0.25,
            "prefill_tok_s": 12.0,
            "decode_tok_s": 40.0,
            "peak_rss_mb": 512.0,
            "cached_tokens": 0,
            "drafted_tokens": 0,
            "accepted_tokens": 0,
        },
    }


def test_json_with_all_that_can_be_asked_for(run: Run, loaded: list[FakeLLM]) -> None:
    result = run(*"generate -n 1 --json --logprobs 2 --num-samples 2 --temp 1 --truncate left".split(), "x " * 70)
    found = json.loads(result.stdout)
    assert found["truncated_tokens"] == 70 - 32
    best, other = (
        {"token": n, "text": f"word{n} ", "bytes": list(f"word{n} ".encode()), "logprob": -0.5 - n} for n in range(2)
    )
    logprobs = [best | {"top": [best, other]}]
    assert found["logprobs"] == logprobs
    sequence = {"text": "word0 ", "tokens": [0], "finish_reason": "length", "seed": 1234, "logprobs": logprobs}
    assert found["sequences"] == [sequence, sequence]


def test_several_prompts_are_one_batch_in_order(run: Run, loaded: list[FakeLLM]) -> None:
    result = run("generate", "-n", "2", "--echo", "one two: ", "three: ")
    assert result.stdout == "one two: word0 word1 \nthree: word0 word1 \n"
    first, second, account, stopped = result.stderr.splitlines()
    assert (first, second) == ("-- 1 of 2: 2 tokens", "-- 2 of 2: 2 tokens")
    assert account.startswith("2 prompts, 3 tokens in all; 4 new in 0.")
    assert account.endswith(" tok/s; loaded in 1.50 s; greedy")
    assert stopped == "2 of 2 stopped after 2 tokens; -n allows more"


@pytest.mark.parametrize("way", ["file", "stdin", "argument"])
def test_each_line_is_a_prompt(run: Run, loaded: list[FakeLLM], tmp_path: Path, way: str) -> None:
    raw = b"\xef\xbb\xbfone two\r\n\n  three \n\nfour\n"
    (tmp_path / "prompts.txt").write_bytes(raw)
    given = {"file": ["-f", str(tmp_path / "prompts.txt")], "stdin": [], "argument": ["-"]}[way]
    result = run("generate", "-n1", *given, "--each-line", "--jsonl", input=raw)
    assert [json.loads(line)["prompt"] for line in result.stdout.splitlines()] == ["one two", "  three ", "four"]
    assert [call["prompt"] for call in loaded[0].calls] == ["one two", "  three ", "four"]
    assert result.stderr == "2 blank lines left out\n"


def test_jsonl_is_an_object_for_each_prompt(run: Run, loaded: list[FakeLLM]) -> None:
    result = run(*"generate -n 1 --jsonl --num-samples 2 --temp 1 -p".split(), "a b", "-p", "c")
    first, second = map(json.loads, result.stdout.splitlines())
    assert (first["prompt"], first["prompt_tokens"], second["prompt"]) == ("a b", 2, "c")
    assert len(first["sequences"]) == len(second["sequences"]) == 2
    (alone,) = run("generate", "-n1", "--jsonl", "a b").stdout.splitlines()
    assert alone + "\n" == run("generate", "-n1", "--json", "a b").stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a", "-p", "b"], "give prompts in one way"),
        (["a", "-f", "b"], "give prompts in one way"),
        (["a", "--each-line"], "--each-line is for the lines of a file"),
        (["a", "b", "--json"], "--json is one object, for one prompt; --jsonl is one a line"),
        (["a", "--json", "--jsonl"], "--json is one object"),
        (["a", "--jsonl", "--echo"], "--echo and --jsonl exclude each other"),
        (["-", "a"], "- is standard input, and stands alone; a prompt that is a dash goes with -p"),
        (["-", "-p", "a"], "give prompts in one way"),
        (["-f", "-", "--each-line"], "--each-line found no line that is not blank"),
        (
            ["a", "--quantize", "q4_k"],
            "'q4_k' is a type of GGUF files, which run as they are; pronk quantize MODEL OUT",
        ),
        (["a", "--quantize", "Q4_0"], "pronk quantize MODEL OUT.gguf --to q4_0 makes one"),
        (["a", "--quantize", "q5"], "'q5' is not one of 'auto'"),
    ],
)
def test_prompts_that_contradict_each_other(run: Run, loaded: list[FakeLLM], arguments: list[str], said: str) -> None:
    result = run("generate", *arguments, input=" \n\n")
    assert result.exit_code == 2
    assert said in result.stderr
    assert loaded == []


def test_prompts_side_by_side_are_what_they_are_alone(run: Run, model: str) -> None:
    """On a model of noise, to the last token; and the one that is too long is told from the others."""
    prompts = ["Once", "upon a time there was", "a"]
    together = run("generate", "-m", model, "-n9", "--jsonl", *prompts)
    alone = [json.loads(run("generate", "-m", model, "-n9", "--json", prompt).stdout) for prompt in prompts]
    assert [json.loads(line)["tokens"] for line in together.stdout.splitlines()] == [found["tokens"] for found in alone]
    result = run("generate", "-m", model, "-c", "16", "short", "x" * 99)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.splitlines()[-1].startswith("pronk: prompt 2 of 2 has 99 tokens and at most 15 fit")


def test_logprobs_without_a_tokenizer_have_no_texts(run: Run, loaded: list[FakeLLM]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeLLM, "has_tokenizer", False)
        found = json.loads(run(*"generate -n 1 --json --logprobs 1 --prompt-ids 1,2".split()).stdout)
    assert found["logprobs"] == [{"token": 0, "logprob": -0.5, "top": [{"token": 0, "logprob": -0.5}]}]


def test_beams_are_printed_when_done(run: Run, loaded: list[FakeLLM]) -> None:
    options = "--num-beams 3 --num-return-sequences 2 --length-penalty 0.5 --early-stopping never"
    result = run(*f"generate -n 2 {options} hi".split())
    params = loaded[0].calls[0]["params"]
    assert (params.length_penalty, params.early_stopping) == (0.5, "never")
    assert result.stdout == "word0 word1 \nword0 word1 \n"
    first, second, statistics, stopped = result.stderr.splitlines()
    assert first == "-- 1 of 2: 2 tokens, score -0.2500"
    assert second == "-- 2 of 2: 2 tokens, score -0.5000"
    assert statistics.endswith("; 3 beams, length-penalty 0.5")
    assert stopped == "2 of 2 stopped after 2 tokens; -n allows more"
    result = run(*"generate -n 2 --num-beams 3 --json hi".split())
    assert json.loads(result.stdout)["score"] == -0.25


def test_several_samples_repeat_the_prompt_with_echo(run: Run, loaded: list[FakeLLM]) -> None:
    result = run(*"generate -n 1 --num-samples 2 --temp 1 --echo Say:".split())
    assert result.stdout == "Say:word0 \nSay:word0 \n"
    assert run(*"generate -n 1 --echo Say:".split()).stdout == "Say:word0 \n"


def test_logprobs_on_stderr(run: Run, loaded: list[FakeLLM]) -> None:
    result = run(*"generate -n 2 --logprobs 2 hi".split())
    assert result.stdout == "word0 word1 \n"
    assert result.stderr.splitlines()[:2] == [
        '  -0.5000  "word0 "   of  "word0 " -0.500  "word1 " -1.500',
        '  -0.5000  "word1 "   of  "word1 " -0.500  "word2 " -1.500',
    ]


def test_a_prompt_that_does_not_fit(run: Run, loaded: list[FakeLLM]) -> None:
    result = run("generate", "x " * 70)
    assert (result.exit_code, result.stdout) == (1, "")
    ways = "shorten it, raise the context size (--ctx-size), or ask for a cut (--truncate left or right)"
    assert result.stderr == f"pronk: the prompt has 70 tokens and at most 63 fit; {ways}\n"
    result = run("generate", "-n1", "--truncate", "right", "x " * 70)
    assert result.exit_code == 0
    assert result.stderr.startswith("32 prompt tokens (38 cut)")


def test_control_characters_reach_a_pipe_but_no_terminal(
    run: Run, loaded: list[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("generate", "-n1", "escape").stdout == "\x1b[31m\n\n"
    terminal = StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", terminal)
    console.write("a\x1b[31m\tb\x07\x9b\x7f\r\né")
    assert terminal.getvalue() == "a␛[31m\tb␇\ufffd␡␍\né"


def test_a_model_without_a_tokenizer_takes_and_gives_ids(
    run: Run, loaded: list[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeLLM, "has_tokenizer", False)
    assert run("generate", "-n3", "--prompt-ids", "5, 6 7").stdout == "0 1 2 \n"
    assert loaded[-1].calls[-1]["prompt"] == [5, 6, 7]
    assert run("generate", "-n2", "--num-samples", "2", "--temp", "1", "--prompt-ids", "5").stdout == "0 1\n0 1\n"
    found = json.loads(run("generate", "-n1", "--json", "--prompt-ids", "5").stdout)
    assert (found["prompt"], found["tokens"]) == ([5], [0])
    assert run("generate", "--prompt-ids", "5,x").exit_code == 2
    assert run("generate", "--prompt-ids", "5", "and text").exit_code == 2


@pytest.mark.parametrize("more", [[], ["Once"], ["-p", "Once"]])
def test_a_model_in_the_place_of_a_prompt_is_noticed(
    run: Run, loaded: list[FakeLLM], tmp_path: Path, more: list[str]
) -> None:
    """Its path was taken for a prompt, and the default model went on with it."""
    (tmp_path / "model.bin").touch()
    result = run("generate", str(tmp_path / "model.bin"), *more)
    assert result.exit_code == 2
    assert "a model goes with -m" in result.stderr
    assert not loaded


@pytest.mark.parametrize("given", [["--system", "Be brief.", "Hi"], ["--chat", "--prompt-ids", "1,2"], ["--chat"]])
def test_what_chat_is_not_for_is_wrong_usage(run: Run, given: list[str]) -> None:
    result = run("generate", *given)
    assert (result.exit_code, "--chat" in result.stderr) == (2, True)
