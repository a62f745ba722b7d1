from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fake_llm import FakeLLM
from tiny_folder import save_tiny_chat_model

import pronk
from pronk.cli import group


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[FakeLLM]:
    """The FakeLLMs that `pronk.load` has given since."""
    models: list[FakeLLM] = []

    def load(model: str, **loading: Any) -> FakeLLM:
        models.append(FakeLLM(model=model, **loading))
        return models[-1]

    monkeypatch.setitem(vars(pronk), "load", load)
    monkeypatch.setenv("PRONK_HOME", str(tmp_path / "home"))
    return models


@pytest.fixture
def run() -> Callable[..., Result]:
    """pronk in this process: run("generate", "-n", "3", input="…")."""

    def run(*arguments: str, input: str | bytes | None = None) -> Result:
        result = CliRunner().invoke(group, list(arguments), input=input, prog_name="pronk", catch_exceptions=True)
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a tiny chat model."""
    return str(save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="session")
def fake_pronk() -> list[str]:
    """The command line of pronk with FakeLLM, in a process of its own."""
    return [sys.executable, str(Path(__file__).with_name("fake_llm.py"))]
