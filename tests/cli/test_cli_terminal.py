"""Issue 15, point 5: what files and models say reaches a terminal through one function. U+202E went past it."""

from __future__ import annotations

import ast
import json
import re
import shutil
import sys
import unicodedata
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path

import pytest

from pronk.cli import console, group, progress
from pronk.errors import BadFile, PronkError
from pronk.terminal import shown, shown_in_line

SRC = Path(console.__file__).resolve().parents[1]
ALL = "".join(map(chr, range(sys.maxunicode + 1)))
BIDI = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # all that Unicode calls Bidi_Control
TURNS = frozenset("LRE LRO RLE RLO PDF LRI RLI FSI PDI".split())
HOSTILE = f"x\x1b]0;y\x07\x9b31m\r\x7f{BIDI}\u2028\u2029\u206a\U000e0001"
# What pronk itself tells a terminal: dimmed and coloured text, and a bar that it draws anew.
OWN = re.compile(r"\x1b\[[0-9;]*m|\r|\x1b\[K")
WRITERS = re.compile(r"print\(|tqdm|echo|\.write|prompt\(|confirm\(")


class Screen(StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_every_character_of_every_category() -> None:
    """Only characters of these categories may change, and each becomes one sign."""
    changed: dict[str, set[str]] = {}
    for c, sign in zip(ALL, shown(ALL), strict=True):
        if sign != c:
            assert sign == ("\ufffd" if c >= "\x80" else "␡" if c == "\x7f" else chr(0x2400 + ord(c)))
            changed.setdefault(unicodedata.category(c), set()).add(c)
    assert changed.keys() == {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert set(ALL[:32] + ALL[127:160]) - changed["Cc"] == {"\t", "\n"}
    assert changed["Cs"] | changed["Zl"] | changed["Zp"] == {*ALL[0xD800:0xE000], "\u2028", "\u2029"}
    turning = {c for c in ALL if unicodedata.bidirectional(c) in TURNS}
    assert turning | set("\u061c\u200e\u200f") == set(BIDI)
    assert set(BIDI) <= changed["Cf"]
    assert set(shown_in_line(ALL[:9999])) == set(shown(ALL[:9999])) - {"\t", "\n"}
    assert str(PronkError(ALL[:2000])) == str(PronkError(shown_in_line(ALL[:2000].replace("\n", " "))))


def test_languages_and_emoji_are_left_as_they_are() -> None:
    hebrew, arabic, persian, malayalam = "שלום עולם", "مرحبا بالعالم", "می\u200cخواهم", "ക്\u200dഷ"
    family, flag, sign = "👩\u200d👩\u200d👧", "🏴\U000e0067\U000e0062\U000e007f", "⚠\ufe0f"
    for text in (hebrew, arabic, persian, malayalam, family, flag, sign, "a\tb\nc", "soft\u00adly"):
        assert shown(text) == text


def test_signs_do_not_depend_on_where_a_stream_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    for c in HOSTILE * 2:
        console.write(c)
    assert screen.getvalue() == shown(HOSTILE * 2)


def test_json_for_a_terminal_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    value = {HOSTILE: [HOSTILE, "é\n", 1.5, None]}
    screen, pipe = Screen(), TextIOWrapper(BytesIO(), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", screen)
    console.write_json(value)
    assert shown(screen.getvalue()) == screen.getvalue()
    assert "é" in screen.getvalue()
    assert json.loads(screen.getvalue()) == value
    monkeypatch.setattr(sys, "stdout", pipe)
    console.write_json(value)
    assert pipe.buffer.getvalue().decode() == json.dumps(value, ensure_ascii=False) + "\n"  # type: ignore[attr-defined]


def test_a_file_or_a_pipe_gets_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = TextIOWrapper(BytesIO(), encoding="utf-8", newline="\n")
    monkeypatch.setattr(sys, "stdout", pipe)
    text = "".join(c for c in ALL if not "\ud800" <= c <= "\udfff")
    console.write(text)
    assert pipe.buffer.getvalue() == text.encode()  # type: ignore[attr-defined]


def test_no_cell_reaches_out_of_its_place() -> None:
    assert console.table([("a\nb\tc", HOSTILE), ("d", "e")]) == f"a␊b␉c  {shown(HOSTILE)}\nd      e"


def test_progress_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    for term in ("xterm", "dumb"):
        screen = Screen()
        monkeypatch.setattr(sys, "stderr", screen)
        monkeypatch.setenv("TERM", term)
        with progress.shown(patience=0) as advance:
            advance(HOSTILE, 1, 10)
        console.note(HOSTILE)
        console.say(HOSTILE)
        assert "␛]0;y" in screen.getvalue()
        assert shown(said := OWN.sub("", screen.getvalue())) == said
    for error in (PronkError(HOSTILE), BadFile(HOSTILE, HOSTILE, field=HOSTILE)):
        assert shown_in_line(str(error)) == str(error)


def test_nothing_else_writes() -> None:
    """Only console.py, and who writes constants, or hands a text to a library's bar."""
    known = {
        "cli/console.py",
        "cli/training_progress.py",  # from a signal handler, bytes of its own
        "cli/chat_editor.py",  # prompt_toolkit's, of what is typed; /edit hands it what `shown` leaves alone
        "checkpoint/hub/local.py",  # shown
        "checkpoint/hub/wheel.py",  # a name from a table of pronk's
    }
    found = set()
    for path in SRC.rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if WRITERS.search(text) else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                called = ast.unparse(node.func)
                writes = called in ("print", "tqdm", "os.write") or called.startswith("click.echo")
                if called == "encoder.prompt":  # which asks nobody
                    continue
                if writes or called.endswith(("stdout.write", "stderr.write", ".secho", ".prompt", ".confirm")):
                    found.add(path.relative_to(SRC).as_posix())
    assert found == known


def test_every_verb_on_a_hostile_model(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name, its tokens, its texts and what is wrong with it: all of it is shown."""
    folder = Path(shutil.copytree(model, tmp_path / f"m{HOSTILE}"))
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["model"]["vocab"] = {HOSTILE if i == 258 else token: i for token, i in raw["model"]["vocab"].items()}
    raw["added_tokens"].append(raw["added_tokens"][-1] | {"id": 258, "content": HOSTILE, "special": False})
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    (broken / "config.json").write_text(json.dumps({"model_type": HOSTILE, "architectures": [HOSTILE]}))
    text, records = tmp_path / "text", tmp_path / "d.jsonl"
    text.write_text((HOSTILE + "\nword ") * 40)
    records.write_text("".join(json.dumps({"prompt": HOSTILE, "completion": f"{i}{HOSTILE}"}) + "\n" for i in range(9)))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("PRONK_HOME", str(tmp_path / "home"))
    m, out, typed = str(folder), str(tmp_path / f"o{HOSTILE}"), HOSTILE.replace("\r", "")
    commands: list[tuple[int, tuple[str, ...]]] = [
        (0, ("generate", "-m", m, "-n", "40", "--temperature", "1", "--echo", "--logprobs", "2", HOSTILE)),
        (0, ("generate", "-m", m, "-n", "4", "--json", HOSTILE)),
        (0, ("generate", "-m", m, "-n", "4", "--num-beams", "2", "--echo", HOSTILE)),
        (1, ("chat", "-m", m, "-n", "40", "--temperature", "1")),
        (0, ("inspect", m)),
        (0, ("inspect", m, "--json")),
        (1, ("inspect", str(broken))),
        (1, ("inspect", m + HOSTILE)),
        (0, ("verify", m, "-n", "2")),
        (0, ("perplexity", m, "--ctx", "64", "-f", str(text))),
        (0, ("divergence", m, m, "--ctx", "64", "-f", str(text))),
        (0, ("convert", m, out, "--to", "safetensors")),
        (0, ("finetune", m, "--data", str(records), "--show-batch")),
        (0, ("list",)),
        (1, ("report", out + HOSTILE)),
        (2, (f"verb\x1b[{BIDI}",)),
        (2, ("generate", f"--no{HOSTILE}")),
    ]
    for code, arguments in commands:
        stdout, stderr = Screen(), Screen()
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(sys, "stderr", stderr)
        monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(f"{typed}\n/nothing{typed}".encode())))
        with pytest.raises(SystemExit) as ended:
            group.main([*arguments], prog_name="pronk")
        said = OWN.sub("", stdout.getvalue() + stderr.getvalue())
        assert shown(said) == said, arguments
        assert ended.value.code == code, (arguments, said[-500:])
        assert said
