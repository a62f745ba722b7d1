"""docs/clients.md: its Python runs as it stands there, where its client is installed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from served import Running, Script

from pronk.serve.models import Models

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "clients.md").read_text("utf-8")
BLOCKS = dict(re.findall(r"## ([^\n]+)\n\n```python\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture(scope="module")
def default(folder: Path) -> Iterator[Running]:
    """A server whose model has the name that the page has."""
    running = Running(Models({"smollm2:135m": str(folder)}, {}, {"threads": 1}, max_sequences=2))
    yield running
    running.stop()


@pytest.mark.parametrize("heading", BLOCKS)
def test_its_python_runs(
    heading: str, default: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = BLOCKS[heading]
    for module in re.findall(r"^(?:import|from) (\w+)", source, re.MULTILINE):
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    Script(monkeypatch).says("Air scatters ", "blue light.")  # a small model's own text may be of no letters
    names: dict[str, object] = {}
    exec(source.replace("http://127.0.0.1:8000", default.url), names)
    assert "Air scatters blue light." in capsys.readouterr().out
    for client in ("client", "claude"):
        if client in names:
            default.kept(names[client])


def test_every_client_is_there() -> None:
    headings = re.findall(r"^## (.+)", PAGE, re.MULTILINE)
    assert list(BLOCKS) == ["OpenAI, Python", "Anthropic", "LangChain", "LlamaIndex"]
    assert {"OpenAI, JavaScript", "llm", "Open WebUI", "curl"} < set(headings)
