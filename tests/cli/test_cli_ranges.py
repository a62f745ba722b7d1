"""Values out of range: each is wrong usage, exit code 2, said under the name that was typed, and nothing is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
import pytest
from click.testing import Result
from fake_llm import FakeLLM

from pronk.cli import VERBS, group
from pronk.cli.parameter_types import Number
from pronk.tokenizer.vocabulary import MAX_VOCABULARY

Run = Callable[..., Result]
# What a verb cannot do without. No such model is anywhere: who looked for it would exit with 1.
NEEDED = {
    "generate": ["-p", "hello"],
    "report": ["none"],
    "merge": ["none", "none", "new"],
    "convert": ["none", "new.gguf"],
    "quantize": ["none", "new.gguf", "--to", "q8"],
    "finetune": ["none", "--data", "none", "--out", "new"],
    "dpo": ["none", "--data", "none", "--out", "new"],
    "kto": ["none", "--data", "none", "--out", "new"],
    "reward": ["none", "--data", "none", "--out", "new"],
    "grpo": ["none", "--data", "none", "--reward", "exact", "--out", "new"],
    "score": ["none", "text"],
    "pretrain": ["none", "--out", "new"],
    "chat": [],
    "list": [],
}
WHOLE = (click.types.IntParamType, click.IntRange)
REAL = (click.types.FloatParamType, click.FloatRange)


def numeric() -> list[tuple[str, str, str]]:
    """Each option of each verb that takes a number, with values out of its range, whichever that is."""
    found = []
    for verb in VERBS:
        command = group.get_command(None, verb)  # type: ignore[arg-type]
        for option in command.params:
            if not isinstance(option, click.Option) or not isinstance(option.type, WHOLE + REAL):
                continue
            values = ["-99999999999", "x"]
            if isinstance(option.type, REAL):
                values += ["nan", "-inf", *([] if getattr(option.type, "infinite", False) else ["inf"])]
            if (most := getattr(option.type, "max", None)) is not None:
                values.append(str(most + 1))
            if (least := getattr(option.type, "min", None)) is not None:
                values.append(str(least if option.type.min_open else least - 1))
            found += [(verb, name, value) for value in values for name in option.opts]
    return found


def test_every_verb_that_takes_numbers_is_looked_at() -> None:
    assert len({verb for verb, _, _ in numeric()}) >= 12
    assert isinstance(Number(), REAL)


@pytest.mark.parametrize("verb", VERBS)
def test_every_value_out_of_range_is_wrong_usage(run: Run, loaded: list[FakeLLM], verb: str, tmp_path: Any) -> None:
    for _, name, value in (row for row in numeric() if row[0] == verb):
        given = [f"{name}={value}"] if name.startswith("--") else [name, value]
        result = run(verb, *NEEDED.get(verb, ["none"]), *given)
        said = result.stderr.splitlines()
        assert (result.exit_code, result.stdout, len(said)) == (2, "", 2), (given, said)
        assert f"{name} " in said[0] or f"'{name}'" in said[0], said[0]
        assert said[1] == f"Try 'pronk {verb} --help'."
    assert not loaded


@pytest.mark.parametrize(
    "given",
    [
        "generate --logit-bias 5=101 x",
        "generate --logit-bias 5=nan x",
        "generate --logit-bias=-1=5 x",
        "generate --prompt-ids=-1",
        "generate --prompt-ids 100",
        "generate --temperature 0.00001 x",
        "generate --top-p 0 --temp 1 x",
        "generate --min-p 1.1 --temp 1 x",
        "generate --presence-penalty 2.5 x",
        "generate --length-penalty 6 --num-beams 2 x",
        "generate --num-beams 2 --num-return-sequences 3 x",
        "generate --rng xorshift -s 0 x",
        "compare none --prefill 0",
        "compare none --prefill -1,5",
        "compare none --prefill 5,x",
        "outliers none --sweep=0,-1",
        "outliers none --sweep=nan",
    ],
)
def test_lists_and_bounds_of_the_library_are_wrong_usage_too(run: Run, loaded: list[FakeLLM], given: str) -> None:
    result = run(*given.split())
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (2, "", 2), result.stderr
    assert "--" in result.stderr.splitlines()[0] or "'-s'" in result.stderr or "-s " in result.stderr


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("--stop-token-id 99999", "--stop-token-id has token 99999, but the model's are from 0 to 258"),
        ("--logit-bias 99999=3", "--logit-bias has token 99999"),
        ("--n-ctx 99999999999", "--n-ctx must be a whole number"),
        ("-c 99999999999", "-c must be a whole number"),
        ("--int8-threshold 3", "--int8-threshold 3.0 is for llm-int8"),
        ("--num-beams 1000", "--num-beams 1000 exceed the 512 tokens of one pass"),
    ],
)
def test_what_only_a_model_can_refuse_is_wrong_usage_too(run: Run, model: str, given: str, name: str) -> None:
    result = run("generate", "-m", model, "-p", "x", *given.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[0].startswith(f"pronk: {name}")
    assert result.stderr.splitlines()[1] == "Try 'pronk generate --help'."


def test_the_largest_vocabulary_of_pretrain_is_the_librarys() -> None:
    options = {option.name: option for option in group.get_command(None, "pretrain").params}  # type: ignore[arg-type]
    assert options["vocab_size"].type.max == MAX_VOCABULARY  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--num-samples 0", "--num-samples must be a whole number from 1 to 65536, not 0"),
        ("--num_samples 0", "--num_samples must be"),
        ("--num-samples 3", "--num-samples 3 gives the same text 3 times, for --temperature 0 is greedy; "
         "give --temperature 0.8 to draw samples, or --num-beams to search for several texts"),
        ("--num-return-sequences 3 --temp 0", "--num-return-sequences 3 gives the same text 3 times, for --temp 0"),
        ("-n -2", "-n must be a whole number from 1 to 2147483647, or -1 (to the end of the context), not -2"),
        ("-n-2", "-n must be"),
        ("--max-tokens -2", "--max-tokens must be"),
        ("--max_gen_len -2", "--max_gen_len must be"),
        ("--n-predict=-2", "--n-predict must be"),
        ("--temp -1", "--temp must be 0 (greedy)"),
        ("--num-beams 2 --rng xorshift", "--rng xorshift means nothing in beam search; leave it or --num-beams 2 out"),
        ("--num-beams 2 --stop a --stop b", "--stop means nothing in beam search; leave it or --num-beams 2 out"),
        ("--num-beams 2 --num-samples 2", "--num-samples 2 contradicts --num-beams 2; ask for --num-return-sequences"),
        ("--early-stopping true", "--early-stopping true means something in beam search only; give --num-beams"),
        ("--top-k 4", "--top-k 4 needs a temperature above 0"),
        ("-c -4", "invalid value for '-c': -4 is not in the range x>=0"),
        ("--max-model-len -4", "invalid value for '--max-model-len'"),
        ("--threads 0", "invalid value for '--threads'"),
    ],
)  # fmt: skip
def test_errors_name_the_option_that_was_typed(run: Run, loaded: list[FakeLLM], given: str, said: str) -> None:
    result = run("generate", "-p", "x", *given.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"pronk: {said}")
    assert not loaded


def test_a_file_named_like_an_option_keeps_its_name(run: Run, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("generate", "-m", "model.bin", "-p", "x")
    assert (result.exit_code, result.stderr[:16]) == (1, "pronk: model.bin")
    (tmp_path / "file").write_bytes(b"\xff")
    result = run("generate", "-m", "none", "-f", "file")
    assert (result.exit_code, result.stderr[:12]) == (1, "pronk: file:")
