"""The page by keys: nothing that is pressed takes the keyboard away with it, and what is said of options holds."""

from __future__ import annotations

from typing import Any

from browsing import MARKS, QUESTION, Opened, answered, ask, bodies, browser, expect, opened, set_options
from scripted import Scripted, long_answer
from served import Running

__all__ = ["browser", "opened"]
pytestmark = MARKS


def focused(view: Any) -> str:
    return view.evaluate("(document.activeElement.ariaLabel ?? document.activeElement.textContent).slice(0, 80)")


def press(view: Any, selector: str) -> None:
    view.focus(selector)
    view.keyboard.press("Enter")


def test_what_is_pressed_keeps_the_keyboard(server: Running, opened: Opened) -> None:
    """Buttons are made anew when they were pressed; the keyboard was then nowhere, and Tab began at the top."""
    view = opened(server.url)
    set_options(view, temperature=1, seed=3, max_tokens=8)
    ask(view)
    answered(view)
    for shown in ("Tokens", "Raw", "Text"):
        press(view, f"button:text-is('{shown}')")
        assert focused(view) == shown
    press(view, "button:text-is('Regenerate')")
    answered(view)
    expect(view.locator(".answer .turns")).to_have_text("‹2/2›")
    assert focused(view).startswith("Your question")  # the button went with the answer
    press(view, ".answer [aria-label='Branch before']")
    assert focused(view) == "Branch behind"  # there is none before the first
    press(view, "button:text-is('Edit')")
    view.keyboard.press("Escape")
    assert focused(view) == "Edit"
    press(view, "button:text-is('Edit')")
    view.keyboard.type(" Or the hill?")
    view.keyboard.press("Enter")
    answered(view)
    assert focused(view) == "Edit"  # of the question that took its place


def test_a_branch_keeps_the_keyboard_inside(server: Running, opened: Opened) -> None:
    view = opened(server.url)
    set_options(view, temperature=0, max_tokens=6)
    ask(view)
    answered(view)
    view.click("button:text-is('Look inside')")
    press(view, ".alternatives button:not(:disabled)")
    answered(view)
    assert view.evaluate("document.activeElement.closest('#inside') !== null")


def test_escape_closes_the_options_and_stops_nothing(opened: Opened) -> None:
    scripted = Scripted(lambda asked: long_answer(400), 4, 0.01)
    try:
        view = opened(scripted.url)
        ask(view)
        view.wait_for_selector(".answer.running")
        view.click("button:text-is('Options')")
        view.focus("#option-max_tokens")
        view.keyboard.type("77")
        view.keyboard.press("Escape")
        expect(view.locator("#options")).to_be_hidden()
        assert focused(view) == "Options"
        answered(view)
        expect(view.locator(".facts")).not_to_contain_text("stopped")
        view.click("button:text-is('Options')")
        expect(view.locator("#option-max_tokens")).to_have_value("77")
    finally:
        scripted.stop()


def test_empty_options_show_what_counts(server: Running, opened: Opened) -> None:
    view = opened(server.url)
    asked = bodies(view)
    view.click("button:text-is('Options')")
    temperature, top_p = view.locator("#option-temperature"), view.locator("#option-top_p")
    told = temperature.get_attribute("placeholder"), top_p.get_attribute("placeholder")
    ask(view)
    answered(view)
    assert told == (str(asked[0]["temperature"]), str(asked[0]["top_p"]))
    temperature.fill("0")
    temperature.blur()
    expect(top_p).to_have_attribute("placeholder", "1")
    expect(view.locator("#option-max_tokens")).to_have_attribute("placeholder", "as many as fit")


def test_an_option_that_cannot_be_is_told_of(server: Running, opened: Opened) -> None:
    """Bug: it stood there as though it counted, and what was chosen before it was asked for without a word."""
    view = opened(server.url)
    asked = bodies(view)
    set_options(view, max_tokens=4)
    view.click("button:text-is('Options')")
    problem = view.locator(".option:has(#option-max_tokens) .problem")
    for wrong in ("8.5", "-3"):
        view.locator("#option-max_tokens").fill(wrong)
        view.locator("#option-max_tokens").blur()
        expect(problem).to_contain_text("this counts: 4")
    ask(view)
    answered(view)
    assert asked[0]["max_tokens"] == 4
    view.locator("#option-max_tokens").fill("5")
    view.locator("#option-max_tokens").blur()
    expect(problem).to_be_hidden()


def test_a_chat_is_called_by_its_first_question_as_it_stands(server: Running, opened: Opened) -> None:
    """Bug: edited, it kept its first name in the list, in the file's and in its heading."""
    view = opened(server.url)
    set_options(view, max_tokens=4)
    ask(view, "One?")
    answered(view)
    view.click("button:text-is('Edit')")
    view.locator(".edit").fill("Another?")
    view.keyboard.press("Enter")
    expect(view.locator(".chats .chat[aria-current]")).to_have_text("Another?")


def test_side_by_side_all_draw_with_one_seed(server: Running, opened: Opened) -> None:
    """Each drew with its own, and so two formats of one model parted at the first token."""
    view = opened(server.url)
    asked = bodies(view)
    set_options(view, max_tokens=4)
    view.click("text=+ beside")
    ask(view)
    answered(view, 2)
    assert asked[0]["model"] != asked[1]["model"]
    assert asked[0]["seed"] == asked[1]["seed"]
    view.click("text=Go on from this one")
    assert focused(view) == "The talk goes on from this one"
    ask(view, QUESTION)
    answered(view, 4)
    assert asked[2]["seed"] == asked[3]["seed"] != asked[0]["seed"]


def test_a_server_that_dies_is_told_of(opened: Opened) -> None:
    scripted = Scripted(lambda asked: long_answer(4000), 4, 0.01)
    view = opened(scripted.url, may_fail="ERR_")
    ask(view)
    view.wait_for_selector(".answer.running .body :not(:empty)")
    scripted.die()
    expect(view.locator(".answer .problem")).to_contain_text("what came is kept")


def test_the_list_of_chats_on_a_narrow_screen(server: Running, opened: Opened) -> None:
    view = opened(server.url, viewport={"width": 400, "height": 800})
    chats = view.locator("#chats")
    press(view, "#bar [aria-label='Chats']")
    expect(chats).to_be_visible()
    assert focused(view) == "Close the list of chats"
    view.keyboard.press("Escape")
    expect(chats).to_be_hidden()
    assert focused(view) == "Chats"
    view.keyboard.press("Enter")
    expect(chats).to_be_visible()
    view.mouse.click(380, 400)
    expect(chats).to_be_hidden()


def test_enter_once_more_goes_inside_and_escape_comes_back(server: Running, opened: Opened) -> None:
    """From a token to what was opened beside it Tab led through all the rest of the chat."""
    view = opened(server.url)
    set_options(view, temperature=0, max_tokens=6)
    ask(view)
    answered(view)
    press(view, "button:text-is('Look inside')")
    assert focused(view) == "Token"
    view.keyboard.press("Escape")
    assert focused(view) == "Look inside"
    view.click("button:text-is('Tokens')")
    view.focus(".strip .token >> nth=0")
    view.keyboard.press("ArrowRight")
    view.keyboard.press("Enter")
    assert focused(view).startswith("token 2,")
    view.keyboard.press("Enter")
    assert focused(view) == "Token"
    view.keyboard.press("Escape")
    assert focused(view).startswith("token 2,")
