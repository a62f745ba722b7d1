"""`pronk generate` with a schema, a regular expression or a grammar, on a tiny model."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from tiny_folder import save_tiny_chat_model

Run = Callable[..., Result]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat_model(tmp_path_factory.mktemp("structured") / "tiny"))


def test_a_schema_from_a_file_and_from_a_pipe(run: Run, tiny: str, tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    found = run("generate", "-m", tiny, "--temp", "1", "-s", "1", "--json-schema", str(file), "x")
    assert found.exit_code == 0, found.stderr
    assert isinstance(json.loads(found.stdout)["n"], int)
    piped = run("generate", "-m", tiny, "--temp", "1", "-s", "1", "--json-schema", "-", "x", input=json.dumps(SCHEMA))
    assert piped.stdout == found.stdout
    several = run(
        "generate", "-m", tiny, "--temp", "1", "--num-samples", "3", "--json", "--json-schema", str(file), "x"
    )
    assert all("n" in json.loads(sample["text"]) for sample in json.loads(several.stdout)["sequences"])


def test_a_regular_expression_and_a_grammar(run: Run, tiny: str, tmp_path: Path) -> None:
    found = run("generate", "-m", tiny, "--chat", "--regex", "[a-c]{4}!", "x")
    assert re.fullmatch("[a-c]{4}!\n", found.stdout)
    file = tmp_path / "sums.lark"
    file.write_text('start: /[0-9]/ ("+" /[0-9]/){2}\n')
    found = run("generate", "-m", tiny, "--grammar", str(file), "x")
    assert re.fullmatch(r"\d\+\d\+\d\n", found.stdout)


def test_what_is_wrong_is_said_in_one_line(
    run: Run, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"not": {}}')
    refused = run("generate", "-m", tiny, "--json-schema", str(file), "x")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert refused.stderr == "pronk: this --json-schema cannot be followed: not supported: 'not'\n"
    absent = run("generate", "-m", tiny, "--json-schema", str(tmp_path / "none"), "x")
    assert absent.exit_code == 1
    assert "No such file" in absent.stderr
    both = run("generate", "-m", tiny, "--json-schema", str(file), "--regex", "a", "x")
    assert both.exit_code == 2
    assert "--json-schema and --regex exclude each other" in both.stderr
    monkeypatch.setitem(sys.modules, "llguidance", None)
    without = run("generate", "-m", tiny, "--regex", "never compiled", "x")
    assert without.exit_code == 1
    assert (
        without.stderr == "pronk: structured output needs llguidance; install it with: pip install 'pronk[grammar]'\n"
    )
