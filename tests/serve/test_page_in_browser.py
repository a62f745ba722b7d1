"""The page in a real browser: chats, branches, models side by side, looking inside; keys, keyboards and files."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from browsing import MARKS, QUESTION, Opened, answered, ask, browser, expect, opened, raw, set_options
from scripted import Scripted, long_answer
from served import Running

import pronk
from pronk.serve.models import Models

__all__ = ["browser", "opened"]
pytestmark = MARKS


def messages(question: str = QUESTION) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def percent(p: float) -> str:
    return f"{100 * p:.1f} %" if p >= 0.001 else "<0.1 %"


def bits_of(strip: Any) -> list[int]:
    return [int(each.partition(" b")[2][:1]) for each in strip.evaluate_all("spans => spans.map(s => s.className)")]


def test_a_chat_is_what_python_says_and_is_kept(server: Running, llm: pronk.LLM, opened: Opened) -> None:
    view = opened(server.url)
    set_options(view, temperature=1, seed=7, max_tokens=40)
    ask(view)
    answered(view)
    first = llm.chat(messages(), max_new_tokens=40, temperature=1.0, seed=7)
    assert raw(view) == first.text
    ask(view, "And the hills?")
    answered(view, 2)
    talk = [*messages(), {"role": "assistant", "content": first.text}, *messages("And the hills?")]
    second = llm.chat(talk, max_new_tokens=40, temperature=1.0, seed=7)
    assert raw(view, 1) == second.text
    view.reload()
    view.wait_for_selector("html[data-ready]")
    answered(view, 2)
    assert [raw(view, 0), raw(view, 1)] == [first.text, second.text]
    expect(view.locator(".chats li")).to_have_count(1)
    view.click("button:text-is('New chat')")
    expect(view.locator(".welcome")).to_be_visible()
    ask(view, "Something else")
    answered(view)
    expect(view.locator(".chats li")).to_have_count(2)
    view.click(f".chats button:text-is('{QUESTION}')")
    answered(view, 2)


def test_stop(server: Running, opened: Opened, idle: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes take 20 ms here: 900 tokens would take 18 seconds."""
    view = opened(server.url)
    session = server.models.models["tiny"].session
    assert session
    step = session.step
    monkeypatch.setattr(session, "step", lambda: time.sleep(0.02) or step())
    set_options(view, temperature=0, max_tokens=900)
    ask(view)
    view.wait_for_selector(".answer.running .body :not(:empty)")
    view.keyboard.press("Escape")
    answered(view)
    expect(view.locator(".facts")).to_contain_text("stopped")
    until = time.monotonic() + 2
    while session.has_work and time.monotonic() < until:
        time.sleep(0.01)
    assert not session.has_work
    expect(view.locator("#composer button")).to_have_text("Ask")


def test_other_chats_go_on_being_answered(opened: Opened) -> None:
    text = long_answer(2500)
    scripted = Scripted(lambda asked: text if asked == "long" else "short", 4, 0.01)
    try:
        view = opened(scripted.url)
        ask(view, "long")
        view.wait_for_selector(".answer.running")
        view.click("button:text-is('New chat')")
        ask(view, "other")
        answered(view)
        view.click(".chats button:text-is('long')")
        expect(view.locator(".answer.running")).to_have_count(1)
        answered(view)
        assert raw(view) == text
        view.click("button:text-is('New chat')")
        ask(view, "long")
        view.wait_for_selector(".answer.running")
        view.locator(".chats .sign").first.click()
        expect(view.locator(".chats li")).to_have_count(2)
        view.reload()
        view.wait_for_selector("html[data-ready]")
        expect(view.locator(".chats li")).to_have_count(2)
    finally:
        scripted.stop()


def test_edit_regenerate_and_branches(server: Running, llm: pronk.LLM, opened: Opened) -> None:
    view = opened(server.url)
    set_options(view, temperature=1, max_tokens=12)
    ask(view)
    answered(view)
    one = raw(view)
    view.click("button:text-is('Regenerate')")
    expect(view.locator(".answer .turns")).to_have_text("‹2/2›")
    answered(view)
    other = raw(view)
    view.click(".answer [aria-label='Branch before']")
    expect(view.locator(".answer .turns")).to_have_text("‹1/2›")
    assert raw(view) == one
    view.click(".question button:text-is('Edit')")
    view.fill(".edit", "Where are the hills?")
    view.press(".edit", "Enter")
    expect(view.locator(".question .turns")).to_have_text("‹2/2›")
    answered(view)
    expect(view.locator(".question .body")).to_have_text("Where are the hills?")
    view.click(".question [aria-label='Branch before']")
    assert raw(view) == one
    view.click(".answer [aria-label='Branch behind']")
    assert raw(view) == other


def test_every_token_can_be_opened(server: Running, llm: pronk.LLM, opened: Opened) -> None:
    view = opened(server.url)
    set_options(view, system="Be brief.", temperature=0, max_tokens=30)
    ask(view)
    answered(view)
    talk = [{"role": "system", "content": "Be brief."}, *messages()]
    given = llm.chat(talk, max_new_tokens=30)
    look = llm.look(talk, answer=given)
    view.click("button:text-is('Tokens')")
    strip = view.locator(".answer .strip .token")
    expect(strip).to_have_count(len(given.tokens))
    steps = (0.3, 1, 2, 3.5, 5, 7, 10)
    assert bits_of(strip) == [sum(b >= step for step in steps) for b in look.bits[look.prompt_tokens :]]

    place = look.prompt_tokens + 9
    token = look[place]
    strip.nth(9).click()
    told = view.locator("#inside .told")
    expect(told).to_contain_text(f"{token.bits:.2f} bits")
    expect(view.locator(".alternatives li")).to_have_count(5)
    shares = view.locator(".alternatives .share").all_text_contents()
    assert shares == [percent(other.probability) for other in token.alternatives]
    view.click("text=Exactly, by the whole vocabulary")
    expect(told).to_contain_text(f"{token.entropy:.2f} bits")
    expect(told).to_contain_text(f"{token.rank} of 259")

    view.click("[role=tab]:text-is('Attention')")
    view.wait_for_selector(".seen")
    layer = llm.config.num_hidden_layers // 2
    row = look.attention(place - 1, layer).mean(0)
    best = sorted(row[:place], reverse=True)[:6]
    assert view.locator(".alternatives .share").all_text_contents() == [percent(each) for each in best]
    expect(view.locator(".seen .token")).to_have_count(place + 1)
    view.select_option("#head", "1")
    best = sorted(look.attention(place - 1, layer, 1)[:place], reverse=True)[:6]
    assert view.locator(".alternatives .share").all_text_contents() == [percent(each) for each in best]

    view.click("[role=tab]:text-is('Layers')")
    rows = view.locator(".lens tbody tr")
    expect(rows).to_have_count(llm.config.num_hidden_layers + 1)
    lens = look.lens(place)
    said = [f"{percent(p)}, rank {rank}" for p, rank in zip(lens.came_probabilities, lens.came_ranks, strict=True)]
    assert rows.locator("td:last-child").all_text_contents() == said[::-1]

    view.click("[role=tab]:text-is('Prompt')")
    expect(view.locator("#inside pre.raw")).to_have_text(look.template_text, use_inner_text=True)
    expect(view.locator("#inside .strip .token")).to_have_count(look.prompt_tokens)
    view.click("[role=tab]:text-is('Cost')")
    expect(told).to_contain_text(f"of {look.prompt_tokens} prompt tokens")
    expect(view.locator("#inside svg.chart")).to_be_visible()


def test_go_on_from_another_token(server: Running, llm: pronk.LLM, opened: Opened) -> None:
    view = opened(server.url)
    set_options(view, temperature=0, max_tokens=20)
    ask(view)
    answered(view)
    given = list(llm.chat(messages(), max_new_tokens=20).tokens)
    prompt = llm.chat_prompt(messages())
    other = llm.look(messages(), answer=given)[len(prompt) + 6].alternatives[2].id
    assert other != given[6]
    view.click("button:text-is('Tokens')")
    view.locator(".answer .strip .token").nth(6).click()
    view.locator(".alternatives li").nth(2).locator("button").click()
    expect(view.locator(".answer .turns")).to_have_text("‹2/2›")
    answered(view)
    begun = [*given[:6], other]
    expected = llm.generate([*prompt, *begun], max_new_tokens=20).tokens
    whole = b"".join(map(llm.tokenizer.token_bytes, [*begun, *expected])).decode("utf-8", "replace")
    expect(view.locator(".answer .strip .token")).to_have_count(7 + len(expected))
    assert raw(view) == whole
    expect(view.locator("#inside .told")).to_contain_text("chosen by you")


def test_two_models_side_by_side(server: Running, llm: pronk.LLM, opened: Opened) -> None:
    view = opened(server.url)
    set_options(view, temperature=0, max_tokens=30)
    view.click("text=+ beside")
    ask(view)
    answered(view, 2)
    one = llm.chat(messages(), max_new_tokens=30)
    other = llm.chat(messages(), max_new_tokens=30, adapter="poet")
    at = next(n for n, pair in enumerate(zip(one.tokens, other.tokens, strict=False)) if pair[0] != pair[1])
    expect(view.locator(".note button")).to_contain_text(f"Parts from tiny at token {at + 1}")
    parts = view.locator(".columns .strip .token.parts")
    assert parts.evaluate_all("spans => spans.map(span => span.n)") == [at, at]
    expect(view.locator(".columns .alike")).to_have_count(2 * at)
    view.click("text=Go on from this one")
    ask(view, "More")
    answered(view, 4)
    talk = [*messages(), {"role": "assistant", "content": other.text}, *messages("More")]
    assert raw(view, 2) == llm.chat(talk, max_new_tokens=30).text
    assert raw(view, 3) == llm.chat(talk, max_new_tokens=30, adapter="poet").text


def test_by_keyboard_alone(server: Running, opened: Opened) -> None:
    view = opened(server.url)
    set_options(view, temperature=0, max_tokens=10)
    view.focus("#question")
    view.keyboard.type(QUESTION)
    view.keyboard.press("Enter")
    answered(view)
    for _ in range(40):
        view.keyboard.press("Shift+Tab")
        if view.evaluate("document.activeElement.textContent") == "Tokens":
            break
    view.keyboard.press("Enter")
    for _ in range(40):
        view.keyboard.press("Tab")
        if view.evaluate("document.activeElement.classList.contains('token')"):
            break
    view.keyboard.press("ArrowRight")
    view.keyboard.press("ArrowRight")
    assert view.evaluate("document.activeElement.getAttribute('aria-label')").startswith("token 3, ")
    view.keyboard.press("Enter")
    expect(view.locator("#inside")).to_be_visible()
    expect(view.locator(".which")).to_contain_text("Token 3 of 10")
    view.focus("#tab-0")
    view.keyboard.press("End")
    expect(view.locator("#tab-4")).to_be_focused()
    expect(view.locator("#tab-4")).to_have_attribute("aria-selected", "true")
    view.keyboard.press("Escape")
    expect(view.locator("#inside")).to_be_hidden()
    assert view.evaluate("document.activeElement.getAttribute('aria-label')").startswith("token 3, ")
    unnamed = view.evaluate(
        "[...document.querySelectorAll('button, select, input, textarea')].filter((each) => each.checkVisibility() &&"
        " !each.textContent.trim() && !each.ariaLabel && !each.labels?.length).length"
    )
    assert unnamed == 0


def test_a_chat_as_a_file(server: Running, llm: pronk.LLM, opened: Opened) -> None:
    view = opened(server.url)
    set_options(view, temperature=0, max_tokens=10)
    ask(view)
    answered(view)
    text = llm.chat(messages(), max_new_tokens=10).text
    with view.expect_download() as found:
        view.select_option("select.export", "md")
    assert f"## You\n\n{QUESTION}\n\n## tiny\n\n{text}\n" in Path(found.value.path()).read_text(encoding="utf-8")
    assert found.value.suggested_filename == "Where-is-the-sea.md"
    with view.expect_download() as found:
        view.select_option("select.export", "json")
    kept = json.loads(Path(found.value.path()).read_text(encoding="utf-8"))
    assert [node.get("text") for node in kept["nodes"].values()] == [None, QUESTION, text]


def test_a_key_is_asked_for_and_kept_with_the_tab(folder: Path, opened: Opened) -> None:
    running = Running(Models({"tiny": str(folder)}, {}, {"threads": 1}), keys=("the-key",))
    try:
        view = opened(running.url, ready=False, may_fail="401")
        expect(view.locator("dialog")).to_contain_text("wants a key")
        view.fill("#key", "another")
        view.press("#key", "Enter")
        expect(view.locator("dialog")).to_contain_text("wrong")
        view.fill("#key", "the-key")
        view.press("#key", "Enter")
        view.wait_for_selector("html[data-ready]")
        set_options(view, max_tokens=5)
        ask(view)
        answered(view)
        assert view.evaluate("JSON.stringify(localStorage) + document.cookie").find("the-key") < 0
        view.reload()
        view.wait_for_selector("html[data-ready]")
    finally:
        running.stop()


def test_what_the_server_refuses_is_said(server: Running, opened: Opened) -> None:
    view = opened(server.url, may_fail="400")
    ask(view, "x" * 2000)
    answered(view)
    expect(view.locator(".answer .problem")).to_contain_text("maximum context length")
