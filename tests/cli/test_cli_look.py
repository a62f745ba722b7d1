"""`pronk look` on a tiny model: tables, JSON, pictures, and refusals in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from pictures import contained

import pronk

Run = Callable[..., Result]
CPU = ("--engine", "cpu", "--threads", "1")


def test_it_says_what_the_library_says(run: Run, model: str) -> None:
    llm = pronk.load(model, engine="cpu", threads=1)
    seen = llm.look("a text", top=2)
    told = json.loads(run("look", "-m", model, "a text", "--top", "2", "--json", *CPU).stdout)
    assert told == {"model": model, **seen.to_dict()}
    for given, more in ((["-"], {"input": "a text\n"}), ([], {"input": "a text"})):
        assert json.loads(run("look", "-m", model, *given, "--top", "2", "--json", *CPU, **more).stdout) == told
    lines = run("look", "-m", model, "a text", *CPU).stdout.splitlines()
    assert lines[0].split()[:2] == ["token", "probability"]
    assert [line.split()[0] for line in lines[1:8]] == [*"012345", "next"]
    assert lines[-1] == f"5 predictions, {seen.bits[1:].mean():.2f} bits a token"
    assert lines[3].split()[3:6] == [f"{seen.bits[2]:.2f}", f"{seen.entropy[2]:.2f}", str(seen.ranks[2])]


def test_answers_stand_behind_the_text(run: Run, model: str) -> None:
    llm = pronk.load(model, engine="cpu", threads=1)
    asked = [{"role": "user", "content": "why"}]
    common = ["-m", model, "why", "--json", *CPU]
    told = json.loads(run("look", *common, "--chat", "--answer", "so").stdout)
    assert told == {"model": model, **llm.look(asked, answer="so").to_dict()}
    written = llm.generate("why", max_new_tokens=4)
    told = json.loads(run("look", *common, "-n", "4").stdout)
    assert told == {"model": model, **llm.look("why", answer=written).to_dict()}  # type: ignore[arg-type]
    assert told["length"] == 3 + len(written.tokens)  # type: ignore[union-attr]


def test_one_token_is_looked_into(run: Run, model: str, tmp_path: Path) -> None:
    seen = pronk.load(model, engine="cpu", threads=1).look("a text")
    common = ["-m", model, "a text", *CPU]
    told = json.loads(run("look", *common, "--token", "3", "--lens", "--json").stdout)
    assert told["lens"] == seen.lens(3).to_dict()
    lines = run("look", *common, "--token", "3", "--lens").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["layer", "1", "0", "embedding"]
    told = json.loads(run("look", *common, "--token", "3", "--layer", "1", "--json").stdout)
    assert told["attention"] == {"token": 3, "layer": 1, "head": None, "weights": seen.attention(3, 1).tolist()}
    told = json.loads(run("look", *common, "--token", "3", "--layer", "1", "--head", "2", "--json").stdout)
    assert told["attention"]["weights"] == seen.attention(3, 1, 2).tolist()
    lines = run("look", *common, "--token", "3", "--layer", "1").stdout.splitlines()
    weights = seen.attention(3, 1).mean(0)
    assert [line.split()[-1] for line in lines[1:]] == [f"{weight:.2%}" for weight in weights[:4]]
    for more, drawn in (
        ([], seen.svg()),
        (["--token", "3", "--lens"], seen.lens(3).svg()),
        (["--token", "3", "--layer", "1"], seen.attention_svg(3, 1)),
    ):
        path = tmp_path / "look.svg"
        run("look", *common, *more, "--plot", str(path))
        assert path.read_text("utf-8") == drawn
        contained(drawn)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--lens"], "name it with --token"),
        (["--token", "1"], "--token goes with --lens"),
        (["--token", "1", "--lens", "--layer", "0"], "leave --layer out"),
        (["--token", "1", "--lens", "--head", "0"], "--head goes with --layer"),
        (["--token", "x", "--lens"], "is not a whole number"),
        (["--answer", "b", "-n", "3"], "exclude each other"),
        (["--top", "0", "--json"], "not in the range"),
        (["-f", "b.txt"], "give the text in one way"),
    ],
)
def test_wrong_usage_is_named_before_anything_is_loaded(run: Run, arguments: list[str], problem: str) -> None:
    result = run("look", "-m", "no-such-model", "a", *arguments)
    assert result.exit_code == 2
    assert problem in result.stderr
    assert len(result.stderr.splitlines()) == 2


def test_places_out_of_range_and_pictures_nowhere_are_one_line(run: Run, model: str, tmp_path: Path) -> None:
    common = ["look", "-m", model, "abc", *CPU]
    for arguments, problem in (
        (["--token", "3", "--layer", "0"], "token must be a whole number from 0 to 2, not 3"),
        (["--token", "0", "--layer", "2"], "layer must be a whole number from 0 to 1, not 2"),
        (["--token", "0", "--layer", "0", "--head", "8"], "head must be a whole number from 0 to 7, not 8"),
        (["--token", "0", "--lens"], "nothing stands before token 0"),
        (["--plot", "look.png"], "name a file that ends in .svg"),
        (["--plot", str(tmp_path / "nowhere" / "look.svg")], "there is no such folder"),
        # Once it named --truncate, which `look` does not have.
        (["-c", "2"], "has 3 tokens and at most 2 fit; shorten it or raise the context size (-c)\n"),
    ):
        result = run(*common, *arguments)
        assert result.exit_code in (1, 2)
        assert problem in result.stderr.replace("--", "")
        assert len(result.stderr.splitlines()) == result.exit_code
