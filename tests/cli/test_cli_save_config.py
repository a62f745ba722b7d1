"""`--save-config`: the file gives the same values when `--config` reads it, whatever was typed and however."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from pronk.cli import VERBS
from pronk.cli.parameter_types import NAME, Number
from pronk.cli.verb import verb


@verb(epilog="")
@click.argument("model", type=NAME)
@click.argument("more", nargs=-1)
@click.option("--data", multiple=True)
@click.option("--lr", "--learning-rate", "lr", type=Number(0), default=0.5)
@click.option("-n", "--max-new-tokens", "max_new_tokens", type=int)
@click.option("--full", is_flag=True)
@click.option("--no-cache", "cache", is_flag=True, flag_value=False, default=True)
@click.option("--private/--public", default=True)
@click.option("--sweep", is_flag=False, flag_value="1,2")
@click.option("--api-key", multiple=True)
@click.option("--resume", is_flag=True)
@click.option("-s", "--seed", type=int)
def verb(**given: Any) -> None:
    click.echo(json.dumps(given))


def ran(*words: str) -> dict[str, Any]:
    result = CliRunner().invoke(verb, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize(
    "words",
    [
        ["m"],
        ["m", "one", "two words", "3"],
        ["m", "--data", "a.jsonl", "--data", "b=0.5", "--learning_rate=1e-4", "-n5", "--full"],
        ["null", "--no-cache", "--public", "--sweep", "--data", "010"],
        ["true", "--private", "--sweep=3,4", "--lr", "0", "--data", "\u2028 # é: [x]", "--data", "~"],
        ["-n", "7", "--", "-m", "--full"],
    ],
)
def test_what_was_typed_comes_back(tmp_path: Path, words: list[str]) -> None:
    path = str(tmp_path / "run.yaml")
    plain = ran(*words)
    assert ran("--save-config", path, *words) == plain
    assert ran("--config", path) == plain


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1, max_size=3))
def test_any_text_comes_back(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    path = str(tmp_path_factory.mktemp("saved") / "run.yaml")
    words = [word for text in texts for word in ("--data", text)]
    assert ran("m", *words, "--save-config", path) == ran("--config", path) == ran("m", *words)


def test_what_a_file_says_is_saved_too_and_what_is_typed_goes_before_it(tmp_path: Path) -> None:
    (tmp_path / "first.yaml").write_text("model: m\nlr: 2e-4\ndata: [a, b]\nfull: true\nno-cache: true\npublic: true\n")
    first, second = str(tmp_path / "first.yaml"), str(tmp_path / "second.yaml")
    both = ran("--config", first, "--lr", "3", "--save-config", second)
    assert both["lr"] == 3
    assert ran("--config", second) == both
    assert (both["private"], both["cache"], both["full"]) == (False, False, True)
    (tmp_path / "first.yaml").write_text("model: m\nprivate: false\n")
    assert ran("--config", first)["private"] is False


def test_no_secret_is_written_and_nothing_that_is_no_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    ran("m", "--api-key", "s3cret", "--resume", "-n", "5", "--save-config", str(path))
    head, seed, *lines = path.read_text().splitlines()
    assert head == "# pronk verb --config run.yaml does this again; what is not here is as it is by default."
    assert seed.endswith("for the same text add `seed: N`.")
    assert sorted(lines) == ["max-new-tokens: 5", "model: m"]
    ran("m", "--seed", "7", "--save-config", str(path))
    assert path.read_text().splitlines()[1:] == ["model: m", "seed: 7"]


def test_a_file_of_somebody_elses_stays(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("mine: true\n")
    result = CliRunner().invoke(verb, ["m", "--save-config", str(path)])
    assert (result.exit_code, path.read_text()) == (2, "mine: true\n")
    assert "stays as it is" in result.output
    path.write_text("# pronk finetune of last week, with notes\nmine: true\n")
    assert CliRunner().invoke(verb, ["m", "--save-config", str(path)]).exit_code == 2
    assert "with notes" in path.read_text()
    path.unlink()
    os.mkfifo(path)  # as /dev/stdin may be: to read from it would not end
    assert CliRunner().invoke(verb, ["m", "--save-config", str(path)]).exit_code == 2
    path.unlink()
    ran("m", "--save-config", str(path))
    ran("n", "--save-config", str(path))  # which is pronk's
    assert ran("--config", str(path))["model"] == "n"


def test_what_is_refused_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    assert CliRunner().invoke(verb, ["m", "--lr", "x", "--save-config", str(path)]).exit_code == 2
    assert not path.exists()
    result = CliRunner().invoke(verb, ["m", "--save-config", str(tmp_path / "none" / "run.yaml")])
    assert result.exit_code == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_has_it(name: str) -> None:
    command = importlib.import_module(f"pronk.cli.{VERBS[name]}").command
    assert {"config", "save_config"} <= {parameter.name for parameter in command.params}
