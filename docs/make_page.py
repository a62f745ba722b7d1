"""Photographs the page of a running server for docs/page.md: python docs/make_page.py URL

The server has two models, as `pronk serve -m smollm2:135m -m ./smollm2-int8` has after `pronk quantize smollm2:135m
./smollm2-int8 --to int8`. Wants playwright, Pillow and the system's chromium.
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import expect, sync_playwright

FOLDER = Path(__file__).with_name("page")
QUESTION = "What is the sea made of?"


def answered(browser: Any, url: str, scheme: str, beside: bool) -> Any:
    """The page with an answer, greedy, of 60 tokens."""
    view = browser.new_page(viewport={"width": 1100, "height": 560}, color_scheme=scheme)
    view.goto(url)
    view.wait_for_selector("html[data-ready]")
    view.click("button:text-is('Options')")
    view.fill("#option-temperature", "0")
    view.fill("#option-max_tokens", "60")
    view.click("button:text-is('Options')")
    if beside:
        view.click("text=+ beside")
    view.fill("#question", QUESTION)
    view.press("#question", "Enter")
    view.wait_for_selector(".answer")
    expect(view.locator(".answer.running")).to_have_count(0, timeout=120_000)
    return view


def keep(view: Any, name: str) -> None:
    """In 128 colours, which are enough, and a third of the bytes."""
    FOLDER.mkdir(exist_ok=True)
    image = Image.open(io.BytesIO(view.screenshot())).convert("RGB")
    image.quantize(128, dither=Image.Dither.NONE).save(FOLDER / name, optimize=True)


def main(url: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        view = answered(browser, url, "light", beside=False)
        view.click("button:text-is('Tokens')")
        view.locator(".strip .token").nth(6).click()
        view.wait_for_selector(".alternatives")
        keep(view, "token.png")
        keep(answered(browser, url, "dark", beside=True), "beside.png")
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1])
