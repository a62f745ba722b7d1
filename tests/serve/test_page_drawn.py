"""What the page draws, in a real browser: hostile answers, growing ones, very long ones; narrow and wide."""

from __future__ import annotations

import random
import re
import statistics

import pytest
from browsing import MARKS, Opened, answered, ask, browser, expect, opened, playwright, raw, set_options
from scripted import Scripted, long_answer, pieces
from served import Running

__all__ = ["browser", "opened"]
pytestmark = MARKS
WATCH = """
  window.gaps = []; window.tasks = [];
  new PerformanceObserver((list) => window.tasks.push(...list.getEntries().map((entry) => entry.duration)))
    .observe({type: 'longtask', buffered: true});
  let last = performance.now();
  const frame = (now) => { window.gaps.push(now - last); last = now; requestAnimationFrame(frame); };
  requestAnimationFrame(frame);
"""
HOSTILE = r"""
<script>window.hit = 1; alert(1)</script>
<img src=x onerror="window.hit=2"> <svg onload="window.hit=3"><iframe src="javascript:window.hit=4"></iframe>
<style>body { display: none }</style> <base href="//evil.example/">
<meta http-equiv="refresh" content="0;url=//evil.example">
<form action="//evil.example"><input name=q autofocus onfocus="window.hit=5"></form>

[click](javascript:window.hit=6) [data](data:text/html,<script>window.hit=7</script>) [vb](VBScript:x)
[odd](&#106;avascript:window.hit=8) [tab](java	script:window.hit=9) <javascript:window.hit=10>
![pixel](https://evil.example/pixel.png) ![x](x "onerror=window.hit=11")
[ok](https://example.org/ "a \"title\" onclick=x")

<details open ontoggle="window.hit=12"><math><mtext></form><form><mglyph><style></math><img src onerror=window.hit=13>

```html
</code></pre><script>window.hit=14</script>
```

| a<script>window.hit=15</script> | b |
|--|--|
| <img src=x onerror=window.hit=16> | `<b>` |

[ref]: javascript:window.hit=17
[ref] &lt;script&gt;window.hit=18&lt;/script&gt; &#x0; &#xD800; &#1114112;
"""


def test_hostile_answers_stay_text(opened: Opened) -> None:
    deep = ">" * 20_000 + " x\n\n" + "- " * 5_000 + "\n\n" + "*" * 30_000 + "\n\n" + "[" * 9_000 + "\n\n| " * 500
    scripted = Scripted({"hostile": HOSTILE, "deep": deep, "null": "a\0b\u202ec\ud7ff"}.__getitem__, 50, 0)
    try:
        view = opened(scripted.url)
        for number, what in enumerate(("hostile", "deep", "null"), 1):
            ask(view, what)
            answered(view, number)
        assert view.evaluate("window.hit") is None
        thread = view.locator("#thread")
        assert thread.locator("script, img, svg, iframe, form, style, base, meta, details, math, object").count() == 0
        links = thread.locator("a")
        assert links.evaluate_all("all => all.map((a) => a.href)") == [
            "https://evil.example/pixel.png",
            "https://example.org/",
        ]
        assert set(links.evaluate_all("all => all.map((a) => a.rel)")) == {"noopener noreferrer nofollow"}
        handlers = thread.locator("*").evaluate_all(
            "(all) => all.flatMap((each) => each.getAttributeNames()).filter((name) => name.startsWith('on'))"
        )
        assert handlers == []
        expect(view.locator(".answer").first).to_contain_text("<script>window.hit = 1; alert(1)</script>")
        expect(view.locator(".answer .code").first).to_contain_text("</code></pre><script>window.hit=14</script>")
        assert raw(view) == HOSTILE
    finally:
        scripted.stop()


GROWN = """async ([texts, seed]) => {
  const { Flow } = await import('/page/flow.js');
  const { render } = await import('/page/markdown.js');
  let state = seed;
  const draw = (most) => (state = (state * 1103515245 + 12345) % 2147483648) % most;
  const shown = (does) => {
    const container = document.createElement('div');
    document.body.append(container);
    does(container);
    container.remove();
    return container.innerHTML;
  };
  return texts.map((text) => [
    shown((container) => {
      const flow = new Flow(container);
      for (let at = draw(9); at < text.length; at += 1 + draw(40)) flow.grow(text.slice(0, at));
      flow.grow(text, true);
    }),
    shown((container) => new Flow(container).grow(text, true)),
    shown((container) => container.append(render(text))).replace(/<div class="section">/g, ''),
  ]);
}"""
BLOCKS = [
    "# Head\n\n", "Some *words*\nand `more`.\n\n", "- one\n- two\n\n- three\n\n", "1. a\n\n   b\n2. c\n\n",
    "> said\n\n", "```py\nx\n\ny\n```\n\n", "~~~~\n```\n~~~~\n\n", "| a | b |\n|--|--|\n| 1 | 2 |\n\n", "---\n\n",
    "    indented\n\n    code\n\n", "  \n\n", "```\nnever closed\n\n# x\n", "<div>\n\n</div>\n\n", "text\n====\n\n",
    "* x\n  * y\n\n    z\n\n", "`a\n\nb`\n\n",
]  # fmt: skip


def test_a_text_that_grows_ends_as_one_that_is_there(server: Running, opened: Opened) -> None:
    """Whatever pieces it comes in; and prose, lists, code and tables are what marked makes of the whole."""
    view, draw = opened(server.url), random.Random(5)
    texts = ["".join(draw.choices(BLOCKS, k=draw.randrange(1, 8))) for _ in range(150)]
    for text, (grown, at_once, _) in zip(texts, view.evaluate(GROWN, [[*texts, HOSTILE], 7]), strict=False):
        assert grown == at_once, text
    plain = [block for block in BLOCKS if not re.search("never|div|a\n\nb|^ |one|a\n\n   b|x\n  ", block)]
    texts = ["".join(draw.choices(plain, k=draw.randrange(1, 8))) for _ in range(100)] + [long_answer(2000)]
    for text, (grown, _, whole) in zip(texts, view.evaluate(GROWN, [texts, 8]), strict=True):
        assert re.sub("</?div[^>]*>", "", grown) == re.sub("</?div[^>]*>", "", whole), text


def test_no_more_is_kept_than_is_said(server: Running, opened: Opened) -> None:
    view = opened(server.url)
    kept, first = view.evaluate(
        """async () => {
          const store = await import('/page/store.js');
          const { newChat } = await import('/page/tree.js');
          for (let n = 0; n < store.MOST_CHATS + 5; n++)
            await store.put({ ...newChat(['tiny']), title: `chat ${n}`, changed: 1000 + n });
          const heads = await store.heads();
          return [heads.length, heads.at(-1).title];
        }"""
    )
    assert (kept, first) == (200, "chat 5")
    left = view.evaluate(
        """async () => {
          const { newChat, add, bounded, noTokens } = await import('/page/tree.js');
          const chat = newChat(['tiny']);
          let at = chat.nodes[chat.root];
          const tokens = { ...noTokens(), ids: [1, 2, 3] };
          for (let n = 0; n < 4; n++) at = add(chat, at, 'assistant', { text: `${n}`, tokens });
          bounded(chat, 7);
          return Object.values(chat.nodes).slice(1).map((node) => [node.text, node.tokens?.ids.length ?? 0]);
        }"""
    )
    assert left == [["0", 0], ["1", 0], ["2", 3], ["3", 3]]


def test_trusted_types_would_stop_a_mistake(server: Running, opened: Opened) -> None:
    view = opened(server.url, may_fail="Trusted")
    with pytest.raises(playwright.Error, match="TrustedHTML"):
        view.evaluate("document.body.innerHTML = '<b>x</b>'")


@pytest.mark.parametrize("shown", ["Text", "Tokens"])
def test_ten_thousand_tokens_without_a_stutter(opened: Opened, shown: str) -> None:
    text = long_answer(10_000)
    scripted = Scripted(lambda asked: text if asked == "long" else "short")
    try:
        view = opened(scripted.url, script=WATCH)
        ask(view, "long")
        view.wait_for_selector(".answer.running")
        view.click(f"button:text-is('{shown}')")
        answered(view)
        gaps, tasks = view.evaluate("[window.gaps, window.tasks]")
        assert raw(view) == text
        if shown == "Tokens":
            view.click("button:text-is('Tokens')")
            expect(view.locator(".strip .token")).to_have_count(len(pieces(text)))
        else:
            view.click("button:text-is('Text')")
            body = view.locator(".answer .body")
            made = [body.locator("table").count(), body.locator("ol").count()]
            assert made == [text.count("| depth |"), text.count("1. First")] != [0, 0]
        quarter = len(gaps) // 4
        early, late = statistics.median(gaps[:quarter]), statistics.median(gaps[-quarter:])
        told = f"{len(gaps)} frames, median {statistics.median(gaps):.1f} ms, longest {max(gaps):.0f} ms"
        print(f"\n{shown}: {told}; longest tasks {sorted(tasks)[-3:]} ms")
        # What grows with the text would show in the last quarter; what stands still shows as one long task.
        assert late < 2 * early + 10
        assert max(tasks, default=0) < 250
    finally:
        scripted.stop()


@pytest.mark.parametrize("width", [320, 390, 800, 1300])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_narrow_and_wide_nothing_sticks_out(server: Running, opened: Opened, width: int, scheme: str) -> None:
    view = opened(server.url, viewport={"width": width, "height": 800}, color_scheme=scheme)
    set_options(view, temperature=0, max_tokens=60)
    view.click("text=+ beside")
    ask(view, "x" * 80)
    answered(view, 2)
    view.locator("#thread .token").nth(2).click()
    for tab in ("Token", "Attention", "Layers", "Prompt", "Cost"):
        view.click(f"[role=tab]:text-is('{tab}')")
        expect(view.locator("#tab-panel > *").first).to_be_visible()
        assert view.evaluate("document.documentElement.scrollWidth") <= width
        beyond = view.evaluate(
            "[...document.querySelectorAll('#inside button, #composer *, #thread .answer')].filter((each) => "
            "each.checkVisibility() && each.getBoundingClientRect().right > innerWidth + 1).length"
        )
        assert beyond == 0
    ground = view.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) < 380) == (scheme == "dark")
