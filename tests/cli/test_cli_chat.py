"""Whole transcripts of `pronk chat`, scripted: test_chat_terminal.py has those on a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from fake_llm import FakeLLM

from pronk.checkpoint import generation_config
from pronk.checkpoint.generation_config import GenerationConfig
from pronk.cli import chat_sampling
from pronk.cli.chat_commands import COMMANDS
from pronk.engine.params import SamplingParams

Run = Callable[..., Result]
ANSWER = {"role": "assistant", "content": "word0 word1 "}
DRAWN = "temperature 0.7, top-p 0.95, seed 1234"
REPORT = f"2 tokens at 40.0 tok/s; {DRAWN}; stopped after 2 tokens; -n allows more\n"


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_scripted_turns(run: Run, loaded: list[FakeLLM]) -> None:
    result = run("chat", "-n", "2", "--system", "Be brief.", input="hello\n\nand now?\n")
    assert result.exit_code == 0
    assert result.stdout == "word0 word1 \nword0 word1 \n"
    assert result.stderr == REPORT * 2
    system = {"role": "system", "content": "Be brief."}
    assert [call["messages"] for call in loaded[0].calls] == [
        [system, user("hello")],
        [system, user("hello"), ANSWER, user("and now?")],
    ]


def test_commands(run: Run, loaded: list[FakeLLM], tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    script = (
        f"one\n/reset\n/system Be kind.\ntwo\n/save {saved}\n/system\n//usr is a folder\n/help\n/exit\nnever said\n"
    )
    result = run("chat", "-n", "2", input=script)
    assert result.exit_code == 0
    assert result.stdout == "word0 word1 \n" * 3
    kind = {"role": "system", "content": "Be kind."}
    assert [call["messages"] for call in loaded[0].calls] == [
        [user("one")],
        [kind, user("two")],
        [user("two"), ANSWER, user("/usr is a folder")],
    ]
    assert json.loads(saved.read_text()) == [kind, user("two"), ANSWER]
    notes = result.stderr.replace(REPORT, "")
    assert notes.startswith(f"conversation forgotten\nsystem prompt set\nsaved to {saved}\n")
    assert "system prompt removed; it was: Be kind.\n" in notes
    assert "/reset               forget" in notes
    for name in COMMANDS:
        assert f"\n{name} " in notes


def test_a_saved_conversation_goes_on(run: Run, loaded: list[FakeLLM], tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    run("chat", "-n", "2", "--system", "Be kind.", input=f"one\n/save {saved}\n")
    result = run("chat", "-n", "2", "-f", str(saved), input=f"two\n/save {saved}\n")
    assert result.exit_code == 0
    before = [{"role": "system", "content": "Be kind."}, user("one"), ANSWER]
    assert loaded[1].calls[0]["messages"] == [*before, user("two")]
    assert json.loads(saved.read_text()) == [*before, user("two"), ANSWER]


def test_save_replaces_no_stranger(run: Run, loaded: list[FakeLLM], tmp_path: Path) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    result = run("chat", "-n", "2", input=f"/save {precious}\n/save\n/save {tmp_path / 'no' / 'such' / 'folder'}\nhi\n")
    assert precious.read_text() == "mine"
    assert (result.exit_code, result.stdout) == (1, "word0 word1 \n")  # the script went on, and the exit code tells
    problems = result.stderr.splitlines()
    assert problems[0] == f"pronk: {precious} exists; name another file, or delete it first"
    assert problems[1] == "pronk: /save needs a file name"
    assert problems[2] == f"pronk: {tmp_path / 'no' / 'such' / 'folder'}: No such file or directory"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[" * 100_000,
        '{"role": "user"}',
        "[1]",
        '[{"role": "user"}]',
        '[{"role": "user", "content": 3}]',
        "caf\xe9",
    ],
    ids=range(8),
)
def test_files_that_are_no_conversation(run: Run, loaded: list[FakeLLM], tmp_path: Path, content: str) -> None:
    path = tmp_path / "talk.json"
    path.write_bytes(content.encode("latin-1"))
    result = run("chat", "-f", str(path), input="")
    assert (result.exit_code, result.stdout, loaded) == (1, "", [])
    assert result.stderr.startswith(f"pronk: {path}: ")
    assert result.stderr.count("\n") == 1


def test_an_unknown_command_is_not_said_to_the_model(run: Run, loaded: list[FakeLLM]) -> None:
    result = run("chat", "-n", "2", input="/retri now\n")
    assert (result.exit_code, result.stdout, loaded[0].calls) == (1, "", [])
    assert (
        result.stderr
        == "pronk: no command /retri; did you mean /retry? /help lists them, and // says a line that begins with /\n"
    )


def test_a_conversation_that_no_longer_fits(run: Run, loaded: list[FakeLLM]) -> None:
    """Refused, if so asked: a question that does not fit is forgotten, so that the next may fit; /reset makes room."""
    script = "short\n" + "long " * 70 + "\nshort again\n/reset\nanew\n"
    result = run("chat", "-n", "2", "--overflow", "error", input=script)
    assert result.exit_code == 1
    assert result.stdout == "word0 word1 \n" * 3
    assert "pronk: the conversation has 73 tokens and at most 63 fit; /reset starts anew" in result.stderr
    assert loaded[0].calls[2]["messages"] == [user("short"), ANSWER, user("short again")]
    assert loaded[0].calls[3]["messages"] == [user("anew")]


def test_a_full_context_is_no_dead_end(run: Run, loaded: list[FakeLLM], tmp_path: Path) -> None:
    """The oldest turns are left out, which is said once; the file that is saved has all of them."""
    saved = tmp_path / "talk.json"
    script = "".join(f"{n} {'more ' * 9}\n" for n in range(12)) + f"/save {saved}\n/reset\nhi\n"
    result = run("chat", "-n", "2", "--system", "Be kind.", input=script)
    assert result.exit_code == 0
    assert result.stdout == "word0 word1 \n" * 13
    full = "the context of 64 tokens is full: from now on the oldest turns are left out, and the system prompt stays"
    assert result.stderr.count(full) == 1
    assert [call["overflow"] for call in loaded[0].calls] == ["drop-oldest"] * 13
    assert len(json.loads(saved.read_text())) == 1 + 24


def test_a_question_longer_than_the_context(run: Run, loaded: list[FakeLLM]) -> None:
    long = "long " * 70
    result = run("chat", "-n", "2", "--system", "Be kind.", input=f"hi\n{long}\nhi\n")
    assert (result.exit_code, result.stdout) == (1, "word0 word1 \n" * 2)
    assert "pronk: this question with the system prompt has 72 tokens and at most 63 fit; shorten it; " in result.stderr
    result = run("chat", "-n", "2", "--truncate", "left", input=f"{long}\n")
    assert (result.exit_code, result.stdout) == (0, "word0 word1 \n")
    assert "38 tokens of the question were cut\n" in result.stderr


def test_an_answer_that_fills_the_context(run: Run, loaded: list[FakeLLM]) -> None:
    result = run("chat", "-n", "60", input="one two three four\n")
    assert result.stderr == f"60 tokens at 40.0 tok/s; {DRAWN}; stopped, for the context of 64 tokens is full\n"


def test_a_byte_order_mark_is_not_said(run: Run, loaded: list[FakeLLM], tmp_path: Path) -> None:
    run("chat", "-n", "2", input=b"\xef\xbb\xbfhello\n\xef\xbb\xbfhello\n")
    first, second = loaded[0].calls
    assert first["messages"] == [user("hello")]
    assert second["messages"][-1] == user("\ufeffhello")  # no mark there, but what was written
    path = tmp_path / "talk.json"
    path.write_text(json.dumps([user("hi")]), encoding="utf-8-sig")
    assert run("chat", "-n", "2", "-f", str(path), input="so?\n").exit_code == 0


def test_where_there_is_no_home(run: Run, loaded: list[FakeLLM]) -> None:
    result = run("chat", "-n", "2", input="/save ~no-such-user/talk.json\n")
    assert result.stderr == "pronk: ~no-such-user/talk.json: No such file or directory\n"


def test_an_error_in_an_answer_ends_no_conversation(run: Run, loaded: list[FakeLLM]) -> None:
    result = run("chat", "-n", "2", input="fail\nhello\n")
    assert result.exit_code == 1
    assert result.stdout == "word0 \nword0 word1 \n"
    assert "pronk: model.bin at byte 3: broken" in result.stderr


def test_what_is_no_text_is_refused(run: Run, loaded: list[FakeLLM]) -> None:
    result = run("chat", "-n", "2", input=b"caf\xe9\n")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "pronk: standard input: not UTF-8 text (byte 3); convert it first\n"


def test_ctrl_c_ends_a_script(run: Run, loaded: list[FakeLLM]) -> None:
    assert run("chat", "-n", "2", input="interrupt\nhello\n").exit_code == 130


def test_undo_takes_the_last_question_back(run: Run, loaded: list[FakeLLM]) -> None:
    result = run("chat", "-n", "2", input="one\ntwo\n/undo\nthree\n/undo\n/undo\n/undo\n")
    assert loaded[0].calls[2]["messages"] == [user("one"), ANSWER, user("three")]
    notes = [line for line in result.stderr.splitlines() if "tok/s" not in line]
    assert notes == ["taken back: two", "taken back: three", "taken back: one", "pronk: nothing was asked yet"]
    assert result.exit_code == 1


def test_retry_asks_the_same_with_another_seed(run: Run, loaded: list[FakeLLM], tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    script = f"one\ntwo\n/retry\n/retry\n/save {saved}\nthree\n"
    assert run("chat", "-n", "2", "--seed", "7", input=script).exit_code == 0
    assert [call["messages"] for call in loaded[0].calls[1:4]] == [[user("one"), ANSWER, user("two")]] * 3
    assert [call["params"].seed for call in loaded[0].calls] == [7, 7, 8, 9, 7]
    assert json.loads(saved.read_text()) == [user("one"), ANSWER, user("two"), ANSWER]
    run("chat", "-n", "2", input="one\n/retry\n")
    assert [call["params"].seed for call in loaded[1].calls] == [None, None]  # drawn anew each time
    result = run("chat", "-n", "2", "--temp", "0", input="one\n/retry\n")
    assert "answers are greedy: of the same question the same one comes; /set temperature 0.7" in result.stderr
    assert "pronk: nothing was asked yet" in run("chat", input="/retry\n").stderr


def test_a_retry_that_fails_leaves_the_answer(run: Run, loaded: list[FakeLLM], tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    script = f"one\n/edit {'long ' * 70}\n/save {saved}\n"
    assert run("chat", "-n", "2", "--overflow", "error", input=script).exit_code == 1
    assert json.loads(saved.read_text()) == [user("one"), ANSWER]


def test_edit_changes_the_last_question(run: Run, loaded: list[FakeLLM]) -> None:
    result = run("chat", "-n", "2", input="one\ntow\n/edit two\nthree\n/edit\n")
    assert loaded[0].calls[2]["messages"] == [user("one"), ANSWER, user("two")]
    assert loaded[0].calls[3]["messages"] == [user("one"), ANSWER, user("two"), ANSWER, user("three")]
    assert result.stderr.splitlines()[-1] == "pronk: /edit needs the new text: /edit TEXT"


def test_system_alone_shows_what_it_takes_away(run: Run, loaded: list[FakeLLM]) -> None:
    said = run("chat", "--system", "Be kind.", input="/system Be brief.\n/system\n/system\n").stderr
    assert said.splitlines() == [
        "system prompt set; it was: Be kind.",
        "system prompt removed; it was: Be brief.",
        "there is no system prompt; /system TEXT sets one",
    ]


def test_load_goes_on_from_a_file(run: Run, loaded: list[FakeLLM], tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    saved.write_text(json.dumps([{"role": "system", "content": "Be kind."}, user("one"), ANSWER]))
    absent, broken, role = tmp_path / "absent.json", tmp_path / "broken.json", tmp_path / "role.json"
    broken.write_text("{")
    role.write_text(json.dumps([{"role": "bot", "content": "x"}]))
    script = f"never\n/load {saved}\ntwo\n/save\n/load\n/load {absent}\n/load {broken}\n/load {role}\nthree\n"
    result = run("chat", "-n", "2", input=script)
    kind = {"role": "system", "content": "Be kind."}
    assert loaded[0].calls[1]["messages"] == [kind, user("one"), ANSWER, user("two")]
    assert loaded[0].calls[2]["messages"][-2:] == [ANSWER, user("three")]  # what could not be loaded changed nothing
    assert json.loads(saved.read_text()) == [kind, user("one"), ANSWER, user("two"), ANSWER]
    notes = [line for line in result.stderr.splitlines() if "tok/s" not in line]
    assert notes[:4] == [
        f"loaded 2 messages and a system prompt from {saved}",
        f"saved to {saved}",
        "pronk: /load needs a file name",
        f"pronk: {absent}: No such file or directory",
    ]
    assert notes[4].startswith(f"pronk: {broken}: not JSON")
    assert notes[5].startswith(f"pronk: {role}: message 0 has the role 'bot'; the roles are system, ")


def test_content_parts_in_a_saved_conversation(run: Run, loaded: list[FakeLLM], tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    path.write_text(json.dumps([user([{"type": "text", "text": "one"}]), ANSWER]))  # type: ignore[arg-type]
    run("chat", "-n", "2", "-f", str(path), input="two\n")
    assert loaded[0].calls[0]["messages"] == [user("one"), ANSWER, user("two")]


def test_tokens_are_counted(run: Run, loaded: list[FakeLLM]) -> None:
    result = run("chat", "-n", "2", "--system", "Be kind.", input="/tokens\none two\n/tokens\n")
    counted = [line for line in result.stderr.splitlines() if "tok/s" not in line]
    beside = "fit beside an answer of 2 in the context of 64"
    assert counted == [f"2 tokens; 60 more {beside}", f"6 tokens; 56 more {beside}"]
    counted = run("chat", "-n", "2", input="one\n" * 30 + "/tokens\n").stderr.splitlines()[-1:]
    assert counted == [f"90 tokens; 62 {beside}, so the oldest turns are left out"]
    result = run("chat", "--overflow", "error", input="/tokens\n")
    assert result.stderr == "0 tokens; 63 more fit in the context of 64\n"


def test_names_of_other_chats_commands(run: Run, loaded: list[FakeLLM]) -> None:
    for name in ("/quit", "/bye"):
        assert run("chat", "-n", "2", input=f"{name}\nnever said\n").exit_code == 0
    result = run("chat", "-n", "2", input="one\n/clear\ntwo\n/?\n")
    assert "list these commands" in result.stderr
    assert loaded[2].calls[1]["messages"] == [user("two")]


def test_a_command_that_takes_nothing_refuses_what_it_is_given(run: Run, loaded: list[FakeLLM]) -> None:
    result = run("chat", "-n", "2", input="one\n/reset it all\ntwo\n")
    assert "pronk: /reset takes no argument; 'it all' was given, so nothing was done" in result.stderr
    assert loaded[0].calls[1]["messages"][0] == user("one")


class TestSampling:
    @staticmethod
    def asked(loaded: list[FakeLLM], call: int = 0) -> Any:
        return loaded[-1].calls[call]["params"]

    def test_without_advice_it_is_the_chats_own(self, run: Run, loaded: list[FakeLLM]) -> None:
        result = run("chat", "-n", "2", input="hi\n")
        params = self.asked(loaded)
        assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.7, 0.95, 0, None)
        assert "temperature 0.7, top-p 0.95, seed 1234" in result.stderr

    def test_temperature_0_is_greedy(self, run: Run, loaded: list[FakeLLM]) -> None:
        assert "; greedy; " in run("chat", "-n", "2", "--temperature", "0", input="hi\n").stderr
        assert (self.asked(loaded).temperature, self.asked(loaded).top_p) == (0.0, 1.0)
        result = run("chat", "--temperature", "0", "--top-p", "0.9", input="hi\n")
        assert (result.exit_code, result.stdout) == (2, "")
        assert "top-p needs a temperature above 0, for 0 is greedy" in result.stderr

    def test_generation_config_says(self, run: Run, loaded: list[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
        advised = GenerationConfig(
            sampling={"temperature": 0.6, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1},
            absent=("typical_p=0.9",),
        )
        monkeypatch.setattr(FakeLLM.checkpoint, "generation", advised)
        result = run("chat", "-n", "2", input="hi\n/set\n")
        params = self.asked(loaded)
        assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (0.6, 0.9, 40, 1.1)
        assert "generation_config.json asks for typical_p=0.9, which pronk does not have" in result.stderr
        assert "top-k               40      generation_config.json" in result.stderr
        run("chat", "-n", "2", "--top-k", "0", "--temp", "1.5", input="hi\n")
        params = self.asked(loaded)
        assert (params.temperature, params.top_p, params.top_k) == (1.5, 0.9, 0)
        run("chat", "-n", "2", "--temp", "0", input="hi\n")
        assert self.asked(loaded) == SamplingParams(max_new_tokens=2)  # no penalty either
        monkeypatch.setattr(FakeLLM.checkpoint, "generation", GenerationConfig(sampling={"temperature": 0.0}))
        assert "; greedy; " in run("chat", "-n", "2", input="hi\n").stderr
        monkeypatch.setattr(FakeLLM.checkpoint, "generation", GenerationConfig(sampling={"temperature": -1}))
        result = run("chat", "-n", "2", input="hi\n")
        assert result.exit_code == 1
        assert "pronk: generation_config.json, or what is asked for beside it: temperature must be 0" in result.stderr

    def test_set(self, run: Run, loaded: list[FakeLLM]) -> None:
        script = (
            "one\n/set temperature 0.2\n/set top_k 5\n/set --max-tokens 3\n/set stop word1 \n/set ignore-eos on\n"
            "/set seed 9\ntwo\n/set top_k default\n/set temp 0\nthree\n/set temp default\nfour\n"
        )
        result = run("chat", "-n", "2", input=script)
        assert result.exit_code == 0
        _, two, three, four = (call["params"] for call in loaded[0].calls)
        assert (two.temperature, two.top_k, two.top_p, two.seed) == (0.2, 5, 0.95, 9)
        assert (two.max_new_tokens, two.stop, two.ignore_eos) == (3, ("word1",), True)
        assert (three.temperature, three.top_p, three.top_k) == (0.0, 1.0, 0)
        assert (four.temperature, four.top_p) == (0.7, 0.95)
        notes = [line for line in result.stderr.splitlines() if "tok/s" not in line]
        assert notes == [
            "temperature 0.2", "top-k 5", "max-new-tokens 3", "stop 'word1'", "ignore-eos on", "seed 9", "top-k 0",
            "temperature 0; answers are greedy now, which draws nothing", "temperature 0.7",
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("typed", "problem"),
        [
            ("temperature hot", "temperature: 'hot' is not a valid float."),
            (
                "temperature -1",
                "temperature must be 0 (greedy) or from 0.0001 to 10000, not -1.0; /set NAME default takes "
                "a setting back",
            ),
            ("temperatur 0", "nothing called temperatur can be set; did you mean temperature?"),
            ("top-k 1.5", "top-k: '1.5' is not a valid integer."),
            ("rng dice", "rng: 'dice' is not one of 'philox', 'xorshift', 'numpy'."),
            ("ignore-eos maybe", "ignore-eos is on or off, not 'maybe'"),
            ("logit-bias x", "logit-bias: 'x' is not a token id and a number, as in 42=-5.0"),
            ("ctx-size 3", "nothing called ctx-size can be set; /set lists what can, other options begin a chat"),
            ("width", "nothing called width can be set; /set lists what can, other options begin a chat"),
        ],
    )
    def test_set_wrongly_changes_nothing(self, run: Run, loaded: list[FakeLLM], typed: str, problem: str) -> None:
        result = run("chat", "-n", "2", input=f"/set {typed}\nhi\n")
        assert result.stderr.splitlines()[0] == f"pronk: {problem}"
        assert result.stderr.endswith(REPORT)
        assert result.exit_code == 1

    def test_set_that_contradicts_says_the_way_out(self, run: Run, loaded: list[FakeLLM]) -> None:
        script = "/set top-p 0.5\n/set temperature 0\nhi\n/set top-p default\n/set temperature 0\nhi\n"
        said = run("chat", "-n", "2", input=script).stderr
        assert (
            "pronk: top-p needs a temperature above 0, for 0 is greedy and draws nothing; /set NAME default takes a "
            "setting back\n" in said
        )
        assert [call["params"].temperature for call in loaded[0].calls] == [0.7, 0.0]

    def test_set_shows(self, run: Run, loaded: list[FakeLLM]) -> None:
        shown = run("chat", "-n", "2", input="/set\n/set top-p\n").stderr.splitlines()
        assert shown[0] == "max-new-tokens      2       set"
        assert shown[1] == "temperature         0.7     chat"
        assert "seed                random" in shown
        assert shown[-1] == "top-p is 0.95"


def test_generate_stays_greedy(run: Run, loaded: list[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLLM.checkpoint, "generation", GenerationConfig(sampling={"temperature": 0.6}))
    run("generate", "-n", "2", "hi")
    assert loaded[0].calls[0]["params"].temperature == 0.0


def test_what_may_be_advised_is_what_is_read() -> None:
    assert set(chat_sampling.ADVISED) == set(generation_config.ADVISED)


def test_help_says_whose_the_defaults_are(run: Run) -> None:
    said = " ".join(run("chat", "--help").stdout.split())
    assert "[default: the model's, else 0.7]" in said
    assert "[default: the model's, else 0.95]" in said
    assert "else 0.7" not in " ".join(run("generate", "--help").stdout.split())


def test_the_chat_template_is_passed_on(run: Run, loaded: list[FakeLLM]) -> None:
    run("chat", "-n", "2", "--chat-template", "llama3", input="hi\n")
    assert loaded[0].calls[0]["chat_template"] == "llama3"


def test_a_template_that_is_none_is_told_before_the_model_is_loaded(
    run: Run, loaded: list[FakeLLM], tmp_path: Path
) -> None:
    (tmp_path / "broken.jinja").write_text("{% if")
    for template, problem in (("absent", "no chat template at absent"), ("broken.jinja", "broken.jinja: line 1")):
        result = run(
            "chat", "--chat-template", template if template == "absent" else str(tmp_path / template), input=""
        )
        assert (result.exit_code, result.stdout, loaded) == (1, "", [])
        assert problem in result.stderr


def test_a_template_that_refuses_the_system_prompt_is_told_before_the_first_turn(
    run: Run, loaded: list[FakeLLM]
) -> None:
    result = run("chat", "--system", "refused", input="")
    assert (result.exit_code, result.stdout, loaded[0].calls) == (1, "", [])
    assert result.stderr == "pronk: the model's chat template refuses these messages: no system prompt\n"
