"""Training data from files of every kind: what a record is, and what is said of those that are none."""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pronk.errors import BadFile, ModelNotFound, PronkError
from pronk.train.data import containers, records

ALPACA = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "alpaca" / "alpaca_data_200.json"
TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
ONE_OF_EACH: dict[str, dict[str, Any]] = {
    "messages": {"messages": TALK},
    "completion": {"prompt": "Two and two is", "completion": " four"},
    "instruction": {"instruction": "Add.", "input": "2, 2", "output": "4"},
    "text": {"text": "Once upon a time."},
    "preference": {"prompt": "2+2=", "chosen": "4", "rejected": "5"},
}


def write_lines(path: Path, *raw: object) -> Path:
    path.write_text("\n".join(map(json.dumps, raw)) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_a_record_is_what_its_keys_say(tmp_path: Path, kind: str) -> None:
    (only,) = records.read(write_lines(tmp_path / "data", ONE_OF_EACH[kind])).items
    assert (only.kind, dict(only.values), only.where) == (kind, ONE_OF_EACH[kind], "line 1")


def test_json_lines_a_list_csv_and_tsv_say_the_same(tmp_path: Path) -> None:
    raw = [{"instruction": f"Say {n}, please", "input": "", "output": f'"{n}"\nand no more'} for n in range(3)]
    write_lines(tmp_path / "lines", *raw)
    (tmp_path / "list").write_text("\ufeff" + json.dumps(raw, indent=2), encoding="utf-8")
    for name, delimiter in (("commas", ","), ("tabs", "\t")):
        with (tmp_path / name).open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(raw[0]), delimiter=delimiter)
            writer.writeheader()
            writer.writerows(raw)
    expected = [record.values for record in records.read(tmp_path / "lines").items]
    assert [dict(values) for values in expected] == raw
    for name in ("list", "commas", "tabs"):
        assert [record.values for record in records.read(tmp_path / name).items] == expected, name


def test_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(arrow.Table.from_pylist([ONE_OF_EACH["messages"]] * 2), tmp_path / "data.parquet")
    found = records.read(tmp_path / "data.parquet").items
    assert [(record.values["messages"], record.where) for record in found] == [(TALK, "record 1"), (TALK, "record 2")]
    (tmp_path / "broken").write_bytes(b"PAR1 and nothing of the kind")
    with pytest.raises(BadFile, match="broken Parquet"):
        records.read(tmp_path / "broken")


@pytest.mark.skipif(not ALPACA.exists(), reason="needs ../shared/data/alpaca")
def test_alpaca() -> None:
    found = records.read(ALPACA)
    assert len(found.items) == 200
    assert {record.kind for record in found.items} == {"instruction"}


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (7, "must be an object, not 7"),
        ({"query": "?", "reply": "!"}, r"has the keys \['query', 'reply'\], which make no record"),
        ({"prompt": "?", "completion": " "}, "has no answer: completion is empty"),
        ({"instruction": "Go", "output": ""}, "has no answer: output is empty"),
        ({"instruction": "Go", "output": 3}, "output must be text, not 3"),
        ({"prompt": "?", "completion": None}, "completion is null"),
        ({"messages": []}, "messages must be a list of messages"),
        ({"messages": "Hi"}, "messages must be a list of messages, not 'Hi'"),
        ({"messages": TALK[:1]}, "none of the messages is the assistant's"),
        ({"messages": [*TALK, {"role": "user", "content": 1}]}, "the content of message 2 must be text, not 1"),
        ({"messages": [{"content": "Hi"}]}, "message 0 must be"),
        ({"prompt": "?", "chosen": "a", "rejected": "a"}, "chosen and rejected are the same"),
        ({"prompt": TALK[:1], "chosen": "a", "rejected": TALK[1:]}, "chosen is not as prompt is"),
        ({"prompt": "?", "chosen": "", "rejected": "a"}, "has no answer: chosen is empty"),
        ({"chosen": "b", "rejected": "a"}, "has no prompt, and chosen and rejected are not conversations"),
        ({"chosen": TALK, "rejected": [*TALK]}, "chosen and rejected are the same"),
        ({"chosen": TALK[1:], "rejected": TALK}, "has no prompt: chosen and rejected begin with different messages"),
        ({"chosen": TALK[:1], "rejected": TALK}, "has no answer: chosen is only a beginning"),
        ({"prompt": "Other", "chosen": TALK, "rejected": TALK[:1]}, "chosen is not as prompt is"),
    ],
)
def test_a_bad_record_names_its_line_or_is_counted(tmp_path: Path, raw: object, problem: str) -> None:
    path = write_lines(tmp_path / "data.jsonl", ONE_OF_EACH["completion"], raw)
    with pytest.raises(BadFile, match=f"data.jsonl: line 2: .*{problem}"):
        records.read(path)
    skipping = records.read(path, skip_bad=True)
    assert len(skipping.items) == 1
    assert len(skipping.skipped) == 1
    assert skipping.skipped[0][0] == "line 2"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"[]", "it holds no records"),
        (b'[{"text": "a"}', "is not JSON"),
        (b'{"text": "a"}\n{"text": ', "line 2: is not JSON"),
        (b'{"text": "a"}\n\n{"text": 1}', "line 3: text must be text"),
        (b"\xff\xfe\x00", "line 1, byte 0: not UTF-8"),
        (b'{"text": "aaaa"}\n' * 2000 + b'{"text": "\xff"}', "line 2001, byte 10: not UTF-8"),
        (b'[{"text": "a"},\n{"text": "\xff"}]', "line 2, byte 10: not UTF-8"),
        (b"text\n" + b"aaaa\n" * 5000 + b"\xe9\n", "line 5002, byte 0: not UTF-8"),
        (b"text\na\nb,c\n", "line 3: has another number of fields"),
        (b'prompt,completion\n"a"x,b\n', "line 2: is neither JSON, Parquet nor well-formed CSV"),
        (b"prompt,completion,prompt\na,b,c\n", "has the column 'prompt' more than once"),
        (b"just words\nand more\n", "has the keys .*'just words'"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"text": "a", "text": "b"}', "line 1: has the key 'text' more than once"),
        (b'[{"text": "a"}, {"text": "a", "text": "a"}]', "record 2: has the key 'text' more than once"),
        (gzip.compress(b'{"text": "a"}', mtime=0), r"is compressed \(gzip\); unpack it first"),
        (b"\n" * 5000 + b'{"text": 1}', "line 5001: text must be text"),
    ],
)
def test_a_broken_file_is_one_line(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "data"
    path.write_bytes(content)
    with pytest.raises(BadFile, match=problem) as caught:
        records.read(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        b'{"text": "a"}\n{"text": \n{"text": "b", "text": "c"}\n{"text": "d"}\n',
        b'[{"text": "a"}, {"text": 1}, {"text": "b", "text": "c"}, {"text": "d"}]',
        b"text\na\nb,c\n \nd\n",
    ],
)
def test_bad_ones_are_counted_however_bad(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "data"
    path.write_bytes(content)
    found = records.read(path, skip_bad=True)
    assert [record.values["text"] for record in found.items] == ["a", "d"]
    assert len(found.skipped) == 2


def test_of_bad_ones_alone_the_first_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="all of its 2 records are bad; the first: line 1: text must be text, not 1"):
        records.read(write_lines(tmp_path / "data", {"text": 1}, {"text": 2}), skip_bad=True)


def test_a_long_text_in_csv(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_text("text\n" + "x" * 200_000 + "\n")  # csv takes 131,072 characters unless it is told otherwise
    (record,) = records.read(path).items
    assert len(record.values["text"]) == 200_000


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadFile, match="is a pipe or a device"):
        records.read(tmp_path / "pipe")


@given(content=st.binary(max_size=200) | st.text(alphabet='{}[]",:\ntex1', max_size=200).map(str.encode))
def test_any_bytes_are_records_or_an_error_of_ours(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "anything"
    path.write_bytes(content)
    with contextlib.suppress(PronkError):  # one line by construction
        assert records.read(path, skip_bad=True).items


def test_keys_that_nobody_reads_are_counted(tmp_path: Path) -> None:
    raw = {**ONE_OF_EACH["instruction"], "id": 7, "text": "all of it at once"}
    found = records.read(write_lines(tmp_path / "data", raw, raw))
    assert found.items[0].kind == "instruction"
    assert found.unused == {"id": 2, "text": 2}


@pytest.mark.parametrize("beside", [{}, {"prompt": None}, {"prompt": TALK[0]["content"]}])
def test_the_prompt_of_two_conversations_is_what_both_begin_with(beside: dict[str, Any]) -> None:
    answers = [[{"role": "assistant", "content": text}] for text in ("4", "5")]
    raw = {"chosen": TALK[:1] + answers[0], "rejected": TALK[:1] + answers[1], **beside}
    found = records.parse(raw, "")
    assert found.kind == "preference"
    assert found.values == {"prompt": TALK[:1], "chosen": answers[0], "rejected": answers[1]}


def test_a_record_of_a_kind_that_is_not_wanted_names_what_is(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "data", ONE_OF_EACH["text"], ONE_OF_EACH["preference"])
    with pytest.raises(
        BadFile, match=r"line 2: chosen\+rejected is what pronk dpo, kto and reward learn from; here .* text$"
    ):
        records.read(path, ("text",))


@pytest.mark.parametrize("name", ["nowhere.json", "no/where.JSONL", "./no/where", "a/b/c", "/tmp/none/here.jsonl"])
def test_what_is_neither_file_nor_dataset(name: str) -> None:
    with pytest.raises(ModelNotFound, match="no such file, and no dataset's name either"):
        records.read(name)


def test_all_bad_records_are_told_at_once(tmp_path: Path) -> None:
    """Whoever mends one a run has as many runs as mistakes."""
    good = ONE_OF_EACH["text"]
    several = write_lines(tmp_path / "several", good, {"text": 1}, good, {"text": None}, {"text": " "})
    with pytest.raises(BadFile) as caught:
        records.read(several)
    told = "3 bad records: line 2: text must be text, not 1; line 4: text is null; line 5: has no answer: text is empty"
    assert str(caught.value) == f"{several}: {told}"
    many = write_lines(tmp_path / "many", *({"text": number} for number in range(25)))
    with pytest.raises(BadFile) as caught:
        records.read(many)
    assert str(caught.value).count("must be text") == 10
    assert str(caught.value).endswith("line 10: text must be text, not 9; and 15 more")
    unknown = write_lines(tmp_path / "unknown", {"a": 1}, {"b": 1})
    with pytest.raises(BadFile) as caught:
        records.read(unknown)
    told = str(caught.value)  # what would do is said once, and not cut short
    assert (
        "line 1: has the keys ['a'], which make no record; line 2: has the keys ['b'], which make no record; " in told
    )
    assert told.count("these do: ") == 1
    assert "…" not in told
    assert told.endswith("text (--fields answer=output gives a key its name)")
    alike = write_lines(tmp_path / "alike", good, *[{"text": None}] * 30)
    with pytest.raises(BadFile, match=r"line 2: text is null; it is the same with all 30 bad records, to line 31$"):
        records.read(alike)


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ({"messages": TALK, "prompt": "a", "completion": "b"}, r"could be messages and prompt\+completion; say which"),
        ({"prompt": "a", "completion": "b", "response": "c"}, r"prompt\+completion and prompt\+response"),
        ({"prompt": "a", "completion": "b", "text": "ab"}, "--fields completion="),
    ],
)
def test_a_record_that_fits_two_kinds_is_refused(tmp_path: Path, raw: dict[str, Any], problem: str) -> None:
    """The first that fitted was taken, and the rest dropped."""
    path = write_lines(tmp_path / "data", raw)
    with pytest.raises(BadFile, match=problem):
        records.read(path)
    (only,) = records.read(path, fields=[f"{next(reversed(raw))}="]).items  # the way out, with the last key
    assert only.kind == ("messages" if "messages" in raw else "completion")


@pytest.mark.parametrize(
    "change",
    [
        {"weight": 0.5}, {"weight": True}, {"weight": "0"}, {"weight": -1},
    ],
)  # fmt: skip
def test_weights_are_0_or_1(tmp_path: Path, change: dict[str, Any]) -> None:
    for number, weight in ((0, 1), (1, change["weight"])):
        talk = [{**message, "weight": weight} if n == number else message for n, message in enumerate(TALK)]
        with pytest.raises(BadFile, match=f"the weight of message {number} must be 0"):
            records.read(write_lines(tmp_path / "data", {"messages": talk}))
    silent = [TALK[0], {**TALK[1], "weight": 0}]
    with pytest.raises(BadFile, match="all messages of the assistant have the weight 0"):
        records.read(write_lines(tmp_path / "data", {"messages": silent}))


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"question": "2+2?", "answer": "4"}, {"instruction": "2+2?", "output": "4"}),
        ({"prompt": "2+2?", "response": "4"}, {"instruction": "2+2?", "output": "4"}),
        ({"instruction": "2+2?", "response": "4", "input": ""}, {"instruction": "2+2?", "output": "4", "input": ""}),
        (
            {"system": "Add.", "question": "2+2?", "answer": "4"},
            {"instruction": "2+2?", "output": "4", "system": "Add."},
        ),
    ],
)
def test_questions_and_answers_by_other_names(raw: dict[str, Any], expected: dict[str, Any]) -> None:
    found = records.parse(raw, "")
    assert (found.kind, dict(found.values), found.unread) == ("instruction", expected, ())


def test_preferences_as_hh_rlhf_and_orca_have_them() -> None:
    """{"chosen", "rejected"} of two texts had "no prompt", and Orca's question and system were dropped."""
    asked, answers = {"role": "user", "content": "2+2?"}, [{"role": "assistant", "content": one} for one in ("4", "5")]
    first = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    told = "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: 2+2?\n\nAssistant: "
    hh = records.parse({"chosen": told + "4", "rejected": told + "5"}, "")
    assert hh.values == {"prompt": [*first, asked], "chosen": answers[:1], "rejected": answers[1:]}
    orca = {"system": "Add.", "question": "2+2?", "chosen": "4", "rejected": "5"}
    system = {"role": "system", "content": "Add."}
    for raw, prompt in ((orca, [system, asked]), ({**orca, "system": ""}, [asked])):
        found = records.parse(raw, "")
        assert found.values == {"prompt": prompt, "chosen": answers[:1], "rejected": answers[1:]}
    with pytest.raises(containers.BadRecord, match="has no prompt"):
        records.parse({"chosen": "Human: a", "rejected": "Human: b"}, "")


def test_trl_s_prompt_and_completion_of_messages_are_a_conversation() -> None:
    found = records.parse({"prompt": TALK[:1], "completion": TALK[1:]}, "")
    assert (found.kind, found.values) == ("messages", {"messages": TALK, "first": 1})
    for raw in ({"prompt": TALK[:1], "completion": "Hello"}, {"prompt": "Hi", "completion": TALK[1:]}):
        with pytest.raises(containers.BadRecord, match="must be"):
            records.parse(raw, "")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{\n "text": "a"\n}\n', r"is one JSON object \(with the keys \['text'\]\), not a record a line"),
        ('{"data": [{"text": "a"}]}', "if records are what 'data' lists, give a file of that list alone"),
        ('{\n"data": [{"text": "a"}]\n}', "if records are what 'data' lists, give a file of that list alone"),
        ('["text", "a"]\n["text", "b"]\n', r"has a list on each line, as \['text', 'a'\]; a record is an object"),
        ('[["a"], ["b"]]', r"record 1: must be an object, not \['a'\]; it is the same|2 bad records"),
    ],
)
def test_what_is_no_list_of_records_is_told_what_it_is(tmp_path: Path, content: str, problem: str) -> None:
    """They were "not JSON"."""
    (tmp_path / "data").write_text(content)
    with pytest.raises(BadFile, match=problem):
        records.read(tmp_path / "data")


SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]


def test_sharegpt(tmp_path: Path) -> None:
    """Becomes the messages that it stands for, whoever speaks; a system prompt may stand beside it."""
    whole = [{"from": "system", "value": "Be kind."}, *SHAREGPT]
    raw = [
        {"conversations": SHAREGPT, "id": "x_0"},
        {"conversations": whole},
        {"conversations": SHAREGPT, "system": "Be kind."},
        {"messages": [{"from": "user", "value": "Hi"}, {"from": "assistant", "value": "Hello", "weight": 1}]},
    ]
    found = records.read(write_lines(tmp_path / "data", *raw)).items
    system = {"role": "system", "content": "Be kind."}
    talks = [TALK, [system, *TALK], [system, *TALK], [TALK[0], {**TALK[1], "weight": 1}]]
    assert [dict(one.values) for one in found] == [{"messages": talk} for talk in talks]
    assert [one.unread for one in found] == [("id",), (), (), ()]
    assert {one.kind for one in found} == {"messages"}


def test_sharegpt_with_tools_and_preferences(tmp_path: Path) -> None:
    call = {"name": "add", "arguments": {"a": 2, "b": 2}}
    raw = [
        {"from": "human", "value": "2+2?"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "4"},
        {"from": "gpt", "value": "Four."},
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    asked, called, told, said = (
        {"role": "user", "content": "2+2?"},
        {"type": "function", "function": call},
        "4",
        "Four.",
    )
    path = write_lines(tmp_path / "data", {"conversations": raw, "tools": json.dumps(tools)})
    (found,) = records.read(path).items
    assert found.values["tools"] == tools
    assert found.values["messages"] == [
        asked,
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "content": told},
        {"role": "assistant", "content": said},
    ]
    answers = {"chosen": SHAREGPT[1], "rejected": {"from": "gpt", "value": "Go away."}}
    path = write_lines(tmp_path / "pairs", {"conversations": SHAREGPT[:1], "system": "Be kind.", **answers})
    (pair,) = records.read(path).items
    assert pair.kind == "preference"
    assert pair.values["prompt"] == [{"role": "system", "content": "Be kind."}, TALK[0]]
    assert (pair.values["chosen"], pair.values["rejected"][0]["content"]) == ([TALK[1]], "Go away.")


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ([], "conversations must be a list of messages"),
        (
            [{"from": "alien", "value": "Hi"}],
            "message 0 of conversations is from 'alien', whom nobody knows; known are",
        ),
        ([{"from": ["human"], "value": "Hi"}], "whom nobody knows"),
        ([{"from": "human", "value": 7}, SHAREGPT[1]], "the content of message 0 must be text, not 7"),
        ([{"from": "human"}, SHAREGPT[1]], "the content of message 0 must be text, not None"),
        ([SHAREGPT[0]], "has no answer: none of the messages is the assistant's"),
        ([SHAREGPT[0], {"from": "gpt", "value": " "}], "has no answer: message 1"),
        ([{"from": "human", "value": "a", "content": "b"}, SHAREGPT[1]], "has both value and content"),
        ([SHAREGPT[0], {"from": "function_call", "value": "add(2)"}], "must be a call of a function as JSON"),
        ([SHAREGPT[0], {"from": "function_call", "value": "[]"}], "must be a call of a function as JSON"),
        ([SHAREGPT[0], {"from": "function_call", "value": "[" * 100_000}], "must be a call of a function as JSON"),
    ],
)
def test_what_is_no_sharegpt(tmp_path: Path, raw: list[Any], problem: str) -> None:
    with pytest.raises(BadFile) as error:
        records.read(write_lines(tmp_path / "data", {"conversations": raw}))
    assert problem in str(error.value)


def test_two_system_prompts(tmp_path: Path) -> None:
    talk = [{"from": "system", "value": "Be brief."}, *SHAREGPT]
    with pytest.raises(BadFile, match=r"has a system prompt beside the conversation and one in it"):
        records.read(write_lines(tmp_path / "data", {"conversations": talk, "system": "Be kind."}))


def test_a_folder_of_texts(tmp_path: Path) -> None:
    """In the order of their names, with those of its folders; nothing hidden, nothing empty, and what is no text is
    told by its name."""
    folder = tmp_path / "texts"
    for name, content in {
        "b.txt": "two", "a.md": "\ufeffone\r\nline", "c/d/e.py": "three", "c/empty.txt": " \n", ".git/config": "no",
        "c/.hidden": "no",
    }.items():  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode())
    found = records.read(folder).items
    assert [(one.where, one.values["text"]) for one in found] == [
        ("a.md", "one\nline"), ("b.txt", "two"), ("c/d/e.py", "three"),
    ]  # fmt: skip
    (folder / "c" / "picture.png").write_bytes(b"\x89PNG\0")
    (folder / "z.txt").write_bytes("Größe".encode("latin-1"))
    with pytest.raises(BadFile, match=r"2 bad records: c/picture.png: is no text: a byte .* z.txt: not UTF-8 text"):
        records.read(folder)
    kept = records.read(folder, skip_bad=True)
    assert (len(kept.items), [where for where, _ in kept.skipped]) == (3, ["c/picture.png", "z.txt"])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_a_folder_of_other_things(tmp_path: Path) -> None:
    """A pipe would be waited for, and a circle of links has no end."""
    (tmp_path / "circle").symlink_to(tmp_path)
    with pytest.raises(BadFile, match="is a folder without texts"):
        records.read(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(BadFile, match=r"link: cannot be read: No such file.*pipe: is a pipe or a device"):
        records.read(tmp_path)


def test_a_file_called_txt_is_one_text(tmp_path: Path) -> None:
    """Its commas made a table of it: "has another number of fields than the header's 2"."""
    tale = tmp_path / "Tim.TXT"
    tale.write_bytes(b"One day, a boy\r\nran, and ran, and ran.\n")
    (only,) = records.read(tale).items
    assert (only.kind, only.where) == ("text", "the text")
    assert only.values == {"text": "One day, a boy\nran, and ran, and ran.\n"}
    (tmp_path / "song.txt").write_text("[Verse 1]\nLa, la")
    assert records.read(tmp_path / "song.txt").items[0].kind == "text"
    for raw in ('{"text": "a"}\n{"text": "b"}\n', '[ {"text": "a"},\n{"text": "b"}]'):  # what is JSON stays that
        (tmp_path / "lines.txt").write_text(raw)
        assert [one.values["text"] for one in records.read(tmp_path / "lines.txt").items] == ["a", "b"]
    (tmp_path / "table.txt").write_text("prompt,completion\na,b\n")  # and a table, a table
    assert records.read(tmp_path / "table.txt").items[0].values == {"prompt": "a", "completion": "b"}
    (tmp_path / "latin.txt").write_bytes("Größe".encode("latin-1"))
    with pytest.raises(BadFile, match=r"latin\.txt: not UTF-8 text"):
        records.read(tmp_path / "latin.txt")
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(BadFile, match="is empty"):
        records.read(tmp_path / "empty.txt")


def test_calls_as_openai_has_them_are_as_those_of_sharegpt(tmp_path: Path) -> None:
    """Their arguments are a string of JSON, which a template would have written as JSON once more."""
    call = {"name": "add", "arguments": {"a": 2}}

    def read(arguments: object) -> Any:
        calls = [{"id": "1", "type": "function", "function": {**call, "arguments": arguments}}]
        talk = [TALK[0], {"role": "assistant", "content": None, "tool_calls": calls}, *TALK]
        (only,) = records.read(write_lines(tmp_path / "data", {"messages": talk})).items
        (found,) = only.values["messages"][1]["tool_calls"]
        assert (found["id"], found["function"]["name"]) == ("1", "add")
        return found["function"]["arguments"]

    assert read('{"a": 2}') == read({"a": 2}) == {"a": 2}
    assert read("") == {}
    for odd in ("add(2)", "[2]", '"a"', "[" * 100_000, 7):
        assert read(odd) == odd
    called = {"from": "function_call", "value": json.dumps({**call, "arguments": "{}"})}
    said = [{"from": "human", "value": "2?"}, called]
    (only,) = records.read(write_lines(tmp_path / "data", {"conversations": said})).items
    assert only.values["messages"][1]["tool_calls"][0]["function"]["arguments"] == {}


SFT = ("messages", "completion", "instruction", "text")


@pytest.mark.parametrize(
    ("raw", "kinds", "told"),
    [
        ({"promt": "a", "completion": "b"}, SFT, "did you mean prompt instead of 'promt'? --fields promt=prompt reads"),
        (
            {"Question": "a", "answers": "b", "id": 1},
            SFT,
            "question instead of 'Question', answer instead of 'answers'? --fields Question=question,answers=answer",
        ),
        ({"prompt": "a", "chosen": "b", "rejcted": "c"}, ("preference",), "--fields rejcted=rejected reads it so"),
        ({"prompt": "a", "answer": "b"}, SFT, "answer=completion learns the answers, and pronk grpo lets the model"),
        ({"prompt": "a"}, SFT, "(prompts alone are what pronk grpo learns from); these do: messages"),
        ({"promt": "a"}, SFT, "which make no record; these do: "),  # and an answer is missing
    ],
)
def test_what_was_meant(tmp_path: Path, raw: dict[str, Any], kinds: Any, told: str) -> None:
    with pytest.raises(BadFile) as caught:
        records.read(write_lines(tmp_path / "data", raw), kinds)
    assert told in str(caught.value)
    if "=" in told and "answer=completion" not in told:
        fields = told.partition("--fields ")[2].split()[0].split(",")
        assert len(records.read(write_lines(tmp_path / "data", raw), kinds, fields=fields).items) == 1


def test_one_fault_is_told_once(tmp_path: Path) -> None:
    """Ten times it was, in one line, where a record of another fault was among them."""
    many = write_lines(tmp_path / "many", *[{"promt": "a", "completion": "b"}] * 11, {"text": 1}, {"text": ""})
    with pytest.raises(BadFile) as caught:
        records.read(many)
    told = str(caught.value)
    assert told.startswith(f"{many}: 13 bad records: line 1 and 10 more, to line 11: has the keys ['completion',")
    assert told.count("promt=prompt") == 1
    assert told.endswith("; line 12: text must be text, not 1; line 13: has no answer: text is empty")
