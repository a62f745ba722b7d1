"""The page in a real browser, for tests: a page of its own for each, and what people do in it.

Wants playwright and a chromium of the system's (Debian: apt install chromium; pip install playwright).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright.expect
MARKS = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine"),
]
QUESTION = "Where is the sea?"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as running:
        found = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


Opened = Callable[..., Any]


@pytest.fixture
def opened(browser: Any) -> Iterator[Opened]:
    """A page of its own; no error is left unseen in it, and nothing it asks goes to another host."""
    contexts, wrong = [], list[str]()

    def about(dialog: Any) -> None:
        if dialog.message.startswith("Delete "):
            dialog.accept()
        else:
            wrong.append(dialog.message)
            dialog.dismiss()

    def one(url: str, *, ready: bool = True, script: str = "", may_fail: str = "", **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1300, "height": 850}, **options})
        contexts.append(context)
        context.add_init_script(script or "0")
        view = context.new_page()
        view.on("pageerror", lambda error: wrong.append(str(error)))
        view.on("dialog", about)
        view.on("request", lambda asked: asked.url.startswith((url, "blob:")) or wrong.append(asked.url))
        view.on(
            "console",
            lambda told: told.type == "error" and ((may_fail and may_fail in told.text) or wrong.append(told.text)),
        )
        view.goto(url)
        if ready:
            view.wait_for_selector("html[data-ready]")
        return view

    yield one
    for context in contexts:
        context.close()
    assert wrong == []


def set_options(view: Any, system: str = "", **options: Any) -> None:
    view.click("button:text-is('Options')")
    if system:
        view.fill("#system", system)
    for name, value in options.items():
        view.fill(f"#option-{name}", str(value))
    view.click("button:text-is('Options')")


def bodies(view: Any) -> list[dict[str, Any]]:
    """Of what the page asks for from now on, as it goes out."""
    found: list[dict[str, Any]] = []
    view.on("request", lambda request: request.post_data and found.append(json.loads(request.post_data)))
    return found


def ask(view: Any, text: str = QUESTION) -> None:
    view.fill("#question", text)
    view.press("#question", "Enter")


def answered(view: Any, answers: int = 1) -> None:
    expect(view.locator("#thread .answer")).to_have_count(answers, timeout=30_000)
    expect(view.locator(".answer.running")).to_have_count(0, timeout=60_000)


def raw(view: Any, answer: int = 0) -> str:
    """What the model wrote, of one of the answers that are shown."""
    shown = view.locator("#thread .answer").nth(answer)
    shown.locator("button:text-is('Raw')").click()
    return shown.locator("pre.raw").text_content()
