"""A server of a tiny model on loopback, in a thread of the tests' own process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from adapters import random_adapter, save
from served import SEQUENCES, Running, Script, soon
from tiny_folder import save_tiny_chat_model

import pronk
from pronk.serve.models import Models


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def adapter(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = pronk.load(folder).config
    return save(tmp_path_factory.mktemp("adapters") / "poet", random_adapter(config, uneven=False))


@pytest.fixture(scope="session")
def llm(folder: Path, adapter: Path) -> Iterator[pronk.LLM]:
    """The same model without a server, and so what the server's texts must be."""
    with pronk.load(folder, threads=1) as llm:
        llm.add_adapter(adapter, "poet")
        yield llm


@pytest.fixture(scope="session")
def server(folder: Path, adapter: Path) -> Iterator[Running]:
    running = Running(Models({"tiny": str(folder)}, {"poet": adapter}, {"threads": 1}, max_sequences=SEQUENCES))
    yield running
    running.stop()


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return server.client()


TOOLS_TEMPLATE = (
    "{% if tools %}<s>tools:{{ tools | tojson }}</s>{% endif %}"
    "{% for m in messages %}<s>{{ m.role }}{{ ' ' + m.name if m.name }}:{{ m.content }}"
    "{% for c in m.tool_calls %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


@pytest.fixture(scope="session")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose template knows of tools."""
    folder = save_tiny_chat_model(tmp_path_factory.mktemp("callers") / "caller")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TOOLS_TEMPLATE}))
    running = Running(Models({"caller": str(folder)}, {}, {"threads": 1}, max_sequences=SEQUENCES))
    yield running
    running.stop()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return Script(monkeypatch)


@pytest.fixture
def idle(server: Running) -> Iterator[None]:
    """Whatever a test leaves behind is found here."""
    yield
    session = server.models.models["tiny"].session
    assert session
    assert soon(lambda: server.engine.texts == 0 and not session.has_work)
    assert (session.load.running, session.load.waiting, session.load.blocks_used) == (0, 0, 0)
