"""The page of a run's rollouts: what it shows, that nothing written by a model is ever markup, and when it is made."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tiny_folder import save_tiny_chat_model

import pronk
from pronk.train import pages
from pronk.train.objectives.rollouts import FILE
from pronk.train.rollouts import lines, page
from pronk.train.runs.reinforcing import _newest

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</bdi></span></li></ol></section></details><h1>owned</h1>",
    "{{ 7 * 7 }}{% raw %}",
    "<!-- ",
    "&lt;b&gt; &#60;i&#62;",
    "<style>body{display:none}</style>",
]


class Seen(HTMLParser):
    """Which elements there are, and all text outside of the style."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.comments, self.said, self._style = 0, "", False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._style = tag == "style"
        self.tags.append(tag)
        self.attributes += [f"{name}={value}" for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        self._style = self._style and tag != "style"

    def handle_data(self, data: str) -> None:
        self.said += "" if self._style else data

    def handle_comment(self, data: str) -> None:
        self.comments += 1


def line(step: int, prompt: Any, completion: str, reward: float = 1.0, **more: Any) -> dict[str, Any]:
    return {
        "step": step, "prompt": prompt, "completion": completion, "reward": reward, "rewards": {"own": reward},
        "advantage": reward - 1, "tokens": 3, "ended": True, **more,
    }  # fmt: skip


def made(folder: Path, lines: list[dict[str, Any]]) -> str:
    (folder / FILE).write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert page.draw(folder, folder / FILE) == folder / page.PAGE
    return (folder / page.PAGE).read_text()


def test_what_models_write_is_text_and_never_markup(tmp_path: Path) -> None:
    plain = Seen(made(tmp_path, [line(1, "a", f"b{n}", more=0) for n in range(len(HOSTILE))]))
    found = Seen(made(tmp_path, [line(1, HOSTILE[0], text, rewards={text: 1, "x": 2}) for text in HOSTILE]))
    assert set(found.tags) == set(plain.tags)
    assert found.tags.count("li") == len(HOSTILE)
    assert not found.comments
    assert all(text in found.said for text in HOSTILE)
    assert not any(attribute.startswith("on") for attribute in found.attributes)
    assert "http-equiv=Content-Security-Policy" in found.attributes


def test_a_page_that_escapes_nothing_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The inverse of the test before."""
    of = "pronk.train.rollouts", "page.html.jinja"
    real = pages._template(*of)
    monkeypatch.setattr(real.environment, "autoescape", False)
    bare = real.environment.from_string((Path(page.__file__).parent / "page.html.jinja").read_text())
    monkeypatch.setattr(pages, "_template", lambda *_: bare)
    found = Seen(made(tmp_path, [line(1, "a", text) for text in HOSTILE]))
    assert {"script", "img"} <= set(found.tags)


def test_signs_stand_for_what_would_turn_the_page(tmp_path: Path) -> None:
    text = made(tmp_path, [line(1, "a\x1b[31m", "one\u202etwo\x00\u2028")])
    assert not set(text) & set("\u202e\x00\u2028\x1b")
    assert "one\ufffdtwo␀\ufffd" in text
    assert "a␛[31m" in text


def test_a_long_run_is_shown_in_part_and_it_is_said(tmp_path: Path) -> None:
    many = [
        line(step, f"prompt {n}", "word " * (1000 if step == 40 else 1), reward=i, ended=False)
        for step in range(1, 41) for n in range(10) for i in range(20)
    ]  # fmt: skip
    text = made(tmp_path, many)
    found = Seen(text)
    assert found.tags.count("details") == 12
    assert found.attributes.count("open=None") == 1
    assert found.tags.count("li") == 12 * 8 * 16
    for said in ("12 of 40 steps", "8 of 10 prompts", "16 of 20 completions", "and 3,000 characters more", "cut off"):
        assert said in found.said, said
    steps = [int(part.split("<")[0]) for part in text.split("<b>Step ")[1:]]
    assert (steps[0], steps[-1]) == (40, 1)
    assert steps == sorted(steps, reverse=True)


def test_the_best_stand_first_and_a_conversation_is_told_by_its_last_message(tmp_path: Path) -> None:
    asked = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Sing."}]
    found = Seen(made(tmp_path, [line(1, asked, f"worth {n}", reward=n) for n in (2, 5, 3)]))
    assert "Sing." in found.said
    assert "Be kind." not in found.said
    assert found.said.index("worth 5") < found.said.index("worth 3") < found.said.index("worth 2")


def test_a_file_that_ends_in_half_a_line(tmp_path: Path) -> None:
    rollouts = tmp_path / FILE
    assert "whole" in made(tmp_path, [line(1, "a", "whole")])
    with rollouts.open("a") as file:
        file.write('{"step": 2, "prompt": "half')
    assert page.draw(tmp_path, rollouts)
    rollouts.write_text("")
    assert page.draw(tmp_path, rollouts) is None


@pytest.mark.parametrize(
    "damaged",
    [
        b"[1]", b"{}", b'{"step": 2}', b"\xff", b"[" * 100_000,
        *(json.dumps(line(2, "a", "b") | {key: value}).encode() for key, value in (
            ("step", "2"), ("prompt", []), ("prompt", [1]), ("completion", None), ("rewards", {"own": "1"}),
            ("reward", float("nan")), ("advantage", 10**400), ("rewards", [1]),
        )),
    ],
)  # fmt: skip
def test_a_damaged_line_ends_what_is_read(tmp_path: Path, damaged: bytes) -> None:
    """`--show-rollouts` gave a TypeError's traceback, or a KeyError's."""
    assert lines.read(damaged) is None
    whole = [line(1, "a", "whole"), line(2, "a", "newer")]
    rollouts = tmp_path / FILE
    rollouts.write_bytes(b"".join(json.dumps(one).encode() + b"\n" for one in whole) + damaged + b"\n")
    assert "newer" in (tmp_path / page.PAGE).read_text() if page.draw(tmp_path, rollouts) else False
    assert [one["completion"] for one in _newest(rollouts)] == ["newer"]


def test_a_run_makes_it_at_each_look_and_checkpoint(tmp_path: Path) -> None:
    model = save_tiny_chat_model(tmp_path / "tiny", max_position_embeddings=64)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{n} and"}) + "\n" for n in range(20)))
    run = pronk.grpo(
        model, tmp_path / "prompts.jsonl", tmp_path / "out", reward="length:3", lora_rank=2, max_steps=3, batch_size=2,
        accumulate=1, num_generations=2, max_new_tokens=4, save_every=3, eval_every=2, samples=0, device="cpu",
        threads=1,
    )  # fmt: skip
    newest: dict[int, str] = {}
    path = tmp_path / "out" / page.PAGE
    for metrics in run:
        newest[metrics["step"]] = path.read_text().split("<b>Step ")[1][0] if path.exists() else ""
    assert newest == {0: "", 1: "", 2: "2", 3: "3"}
    text = path.read_text()
    assert "<svg" in text
    assert Seen(text).tags.count("li") == 3 * 2 * 2


def test_one_that_cannot_be_written_is_told_of(tmp_path: Path) -> None:
    (tmp_path / page.PAGE / "in the way").mkdir(parents=True)
    (tmp_path / FILE).write_text(json.dumps(line(1, "a", "b")) + "\n")
    told: list[str] = []
    page.refresh(tmp_path, tmp_path / FILE, told.append)
    (said,) = told
    assert said.startswith(f"{tmp_path / page.PAGE} cannot be written: ")
