"""`--config`: a file of options is the same words as the command line, which goes first; what is none is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from fake_llm import FakeLLM
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pronk.cli import VERBS, group, recipe
from pronk.cli.parameter_types import NAME, Number
from pronk.cli.verb import verb

Run = Callable[..., Result]


@verb(epilog="")
@click.argument("model", type=NAME)
@click.argument("more", nargs=-1)
@click.option("--data", multiple=True)
@click.option("--lr", "--learning-rate", "lr", type=Number(0), default=0.5)
@click.option("-n", "--max-new-tokens", "max_new_tokens", type=int)
@click.option("--full", is_flag=True)
@click.option("--no-cache", "cache", is_flag=True, flag_value=False, default=True)
@click.option("--sweep", is_flag=False, flag_value="1,2")
def verb(**given: Any) -> None:
    click.echo(json.dumps(given))


def asked(*words: str) -> dict[str, Any]:
    result = CliRunner().invoke(verb, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def file(folder: Path, text: str | bytes) -> str:
    path = folder / "run.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


WAYS: list[tuple[str, list[str]]] = [
    ("lr: 2e-4", ["--lr", "2e-4"]),  # which is text to YAML
    ("learning_rate: 0.1", ["--learning-rate", "0.1"]),
    ("data: [a.jsonl, 'b.jsonl=0.5']", ["--data", "a.jsonl", "--data", "b.jsonl=0.5"]),
    ("data: a.jsonl", ["--data", "a.jsonl"]),
    ("data: [no, 010, 1_000, 1:30, ~]", [w for d in ("no", "010", "1_000", "1:30", "~") for w in ("--data", d)]),
    ("full: true\nno-cache: on", ["--full", "--no-cache"]),
    ("full: false\nno-cache: False\nlr: null\nmax-new-tokens:\ndata: []", []),
    ("max-new-tokens: 010", ["-n", "010"]),
    ("max_tokens: 5", ["--max-tokens", "5"]),  # as vLLM has it
    ("more: [one, two words]", ["one", "two words"]),
    ("sweep: 3,4", ["--sweep", "3,4"]),
    ("sweep: true", ["--sweep"]),
    ("data:\n- &a x\n- *a", ["--data", "x", "--data", "x"]),
]


@pytest.mark.parametrize(("text", "words"), WAYS)
def test_a_file_is_the_words(tmp_path: Path, text: str, words: list[str]) -> None:
    assert asked("--config", file(tmp_path, f"model: m:135m\n{text}\n")) == asked("m:135m", *words)


def test_the_command_line_goes_first(tmp_path: Path) -> None:
    path = file(tmp_path, "model: theirs\ndata: [a, b]\nlr: 0.25\nfull: yes\nmore: [x]\n")
    found = asked("ours", "y", "--config", path, "--data", "c", "--lr", "0.125")
    assert (found["model"], found["more"], found["data"], found["lr"], found["full"]) == (
        "ours",
        ["y"],
        ["c"],
        0.125,
        True,
    )
    assert asked("--config", path)["model"] == "theirs"


@settings(deadline=None, max_examples=50)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
@example("\x85")
@example("a\u2028b")
def test_any_word_comes_back(tmp_path_factory: pytest.TempPathFactory, word: str) -> None:
    """As run.yaml has it. U+0085 came back as a space."""
    from pronk.train.runs.recipe import text

    folder = tmp_path_factory.mktemp("words")
    (folder / "run.yaml").write_text(text({"model": word}), "utf-8", newline="\n")
    assert asked("--config", str(folder / "run.yaml"))["model"] == word


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{n}: &{n} [{', '.join([f'*{before}'] * 9)}]\n" for before, n in zip("abcdefghi", "bcdefghij", strict=True)
)
WRONG: list[tuple[str | bytes, int, str]] = [
    ("lora-rnk: 4", 2, "no option 'lora-rnk' of verb"),
    ("max-new-token: 4", 2, "no option 'max-new-token' of verb; did you mean max-new-tokens?"),
    ("torch_dtype: bf16", 2, "; --quantize is f32, bf16 or f16"),
    ("config: other.yaml", 2, "no option 'config'"),
    ("lr: 1\nlr: 2", 2, "lr stands there twice; leave one out"),
    ("lr: 1\nlearning-rate: 2", 2, "lr and learning-rate are the same option"),
    ("model: m\nlr: fast", 2, "invalid value for 'lr' in "),
    ("model: m\nlr: [1]", 2, "lr takes one value, not a list"),
    ("model: m\nlr: {a: 1}", 2, "lr takes words, not a mapping"),
    ("model: m\ndata: [[a]]", 2, "data takes words, not a list"),
    ("model: m\nfull: 1", 2, "full is a switch: true or false, not '1'"),
    ("model: m\nfull: 'true'", 2, "full is a switch"),
    ("model: !!python/object/apply:os.system ['touch here']", 2, "model takes one value"),
    ("model: !!python/name:os.system x", 2, "model has the tag"),
    ("model: !!binary aGk=", 2, "model has the tag"),
    ("<<: {model: m}", 2, "no option '<<'"),
    ("model: *x", 1, "is not YAML: found undefined alias"),
    ("data: &a [*a]", 2, "data takes words, not a list"),
    (LAUGHS, 2, "no option 'a' of"),
    ("data: &a [x]\n" + "lr: 1\n" * 3, 2, "lr stands there twice"),
    ("- model", 1, "must hold options"),
    ("model", 1, "must hold options"),
    ("", 1, "must hold options"),
    ("# nothing\n", 1, "must hold options"),
    ("? [a]\n: b", 1, "has a key that is no word"),
    ("model: m\n---\nmodel: n", 1, "is not YAML: "),
    ("model: [", 1, "is not YAML: "),
    ("a:\tb\n c", 1, "is not YAML: "),
    ("model: \"\\U00110000\"", 1, "is not YAML: "),
    ("model: a\0b", 1, "is not YAML: "),
    (b"model: \xff", 1, "not UTF-8 text (byte 7)"),
    (b"model: " + b"[" * 100_000, 1, "is nested too deep"),
    (b"model: x\n" + b"#" * (1 << 18), 1, "is larger than 256 KiB"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "code", "told"), WRONG)
def test_what_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | bytes, code: int, told: str) -> None:
    monkeypatch.setattr(type(group), "get_command", lambda *_: verb)
    result = CliRunner().invoke(group, ["generate", "--config", file(tmp_path, text)], prog_name="pronk")
    assert result.exit_code == code
    lines = result.stderr.splitlines()
    assert len(lines) == code
    assert lines[0].startswith("pronk: ")
    assert told.replace("of verb", "of pronk generate") in lines[0]
    assert "run.yaml" in lines[0]
    assert len(lines[0]) < 400


@pytest.mark.parametrize("name", ["nowhere.yaml", "."])
def test_no_file(run: Run, tmp_path: Path, name: str) -> None:
    result = run("inspect", "--config", str(tmp_path / name))
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)


def test_every_verb_takes_one(tmp_path: Path, run: Run) -> None:
    context = click.Context(group)
    for name in VERBS:
        command = group.get_command(context, name)
        assert command
        assert "--config" in {opt for one in command.params for opt in one.opts}, name
        result = run(name, "--config", file(tmp_path, "no-such-thing: 1"))
        assert (result.exit_code, "no option 'no-such-thing' of pronk" in result.stderr) == (2, True), name


def test_generate(run: Run, loaded: list[FakeLLM], tmp_path: Path) -> None:
    """Of a verb that trains nothing; what says whether an option was given sees the file's."""
    path = file(
        tmp_path, "model: mine\nprompt: Once upon a time\nmax-new-tokens: 3\nquantize: q8\nno-pack-cache: true\n"
    )
    result = run("generate", "--config", path)
    assert result.exit_code == 0, result.stderr
    typed = run("generate", "-m", "mine", "-p", "Once upon a time", "-n", "3", "--quantize", "q8", "--no-pack-cache")
    assert result.stdout == typed.stdout
    first, second = ({**one.loading, "progress": None} for one in loaded)
    assert first == second


def test_names_are_everybodys_own() -> None:
    """No two options of a verb have a name in common, whatever they are called in Python."""
    context = click.Context(group)
    for name in VERBS:
        command = group.get_command(context, name)
        assert command
        known = recipe._names(command)
        for one in command.params:
            for opt in one.opts:
                if opt.startswith("--") and one.name not in ("config", "save_config"):
                    assert recipe._meant(opt[2:], known) is one, (name, opt)


def test_a_file_of_another_verb_is_told_as_such(run: Run, tmp_path: Path) -> None:
    """`reward` of pronk grpo: "did you mean threads?"."""
    head = "# pronk grpo --config run.yaml --out FOLDER does this again; what is not here is as it is by default.\n"
    result = run("finetune", "--config", file(tmp_path, f"{head}model: m\nreward: exact\n"))
    told = "no option 'reward' of pronk finetune; its first line says that it is of pronk grpo"
    assert (result.exit_code, told in result.stderr.splitlines()[0]) == (2, True)
