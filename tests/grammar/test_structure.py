"""Structures: how they are asked for, and what is refused before a token is drawn."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from typing import Any, ClassVar

import pytest
from tiny import byte_tokenizer

import pronk.tokenizer
from pronk.engine.grammar import Ungrammatical
from pronk.errors import BadRequest, PronkError
from pronk.grammar import compiled, trial
from pronk.grammar.compiled import Compiler
from pronk.grammar.structure import Structure

PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    file = byte_tokenizer(tmp_path_factory.mktemp("bytes") / "tokenizer.bin")
    tokenizer = pronk.tokenizer.load(pronk.tokenizer.find(file))
    return Compiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)


def takes(compiler: Compiler, structure: Structure, text: str) -> bool:
    """Whether the text is one of the structure's, whole."""
    matcher = compiler.compile(structure).matcher([40])
    try:
        for byte in text.encode():
            matcher.advance(3 + byte)
    except Ungrammatical:
        return False
    return matcher.may_end


class Model:
    """As pydantic's."""

    schema: ClassVar[dict[str, Any]] = PERSON

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return cls.schema


def test_a_schema_comes_as_a_dict_a_text_or_a_model() -> None:
    text = json.dumps(PERSON, separators=(",", ":"))
    made = [Structure.json_schema(schema) for schema in (PERSON, text, text.encode(), Model, Model())]
    assert set(made) == {Structure("json_schema", text)}
    assert Structure.of(PERSON, None) == made[0]
    assert Structure.of(None, made[0]) is made[0]
    assert Structure.of(None, None) is None


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Structure.json_schema(5), "a dict, JSON text or a pydantic model, not int"),
        (lambda: Structure.json_schema({"a": {1, 2}}), "what JSON does not have"),
        (lambda: Structure.json_schema({"a": "\ud800"}), "lone surrogate"),
        (lambda: Structure.json_schema(b"\xff"), "not UTF-8"),
        (lambda: Structure.regex(5), "a text, not int"),  # type: ignore[arg-type]
        (lambda: Structure.choice("yes"), "a list of texts"),
        (lambda: Structure.choice([]), "a list of texts"),
        (lambda: Structure.choice(["a", ""]), "not empty"),
        (lambda: Structure("xml", "a"), "not 'xml'"),  # type: ignore[arg-type]
        (lambda: Structure.of(PERSON, Structure.regex("a")), "contradict each other"),
        (lambda: Structure.of(None, PERSON), "a schema goes in schema="),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_structure(make: Any, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        make()


@pytest.mark.parametrize(
    ("structure", "good", "bad"),
    [
        (Structure.regex("[0-9]{3}"), ["123"], ["12", "1234", ""]),
        (Structure.regex("^ab?$"), ["a", "ab"], ["abb", "xa"]),
        (Structure.choice([f"{n:05d}" for n in range(3000)]), ["00000", "02999"], ["0299", "03000"]),
        (Structure.choice(["yes", "no", 'q"\\\n\x7f', "😀"]), ["yes", "no", 'q"\\\n\x7f', "😀"], ["ye", "yesno", "q"]),
        (Structure.json_object(), ["{}", '{"a": [1,2]}', '{"a":{"b":null}}'], ["[]", "1", "{ }", '{"a":1}\n']),
        (Structure.grammar('start: "a" b\nb: "b" | "c" b'), ["ab", "accb"], ["a", "b"]),
        (Structure.grammar('root ::= "x" digit+\ndigit ::= [0-9]'), ["x1", "x12"], ["x", "1"]),
        (Structure.json_schema(PERSON), ['{"name":"a"}', '{"name": "é\\n", "b":1}'], ['{"name":1}', '{"name":"a" }']),
    ],
)
def test_each_kind_takes_its_own_texts(
    compiler: Compiler, structure: Structure, good: list[str], bad: list[str]
) -> None:
    assert {text: takes(compiler, structure, text) for text in [*good, *bad]} == {
        **dict.fromkeys(good, True),
        **dict.fromkeys(bad, False),
    }


def test_spaces_stand_after_commas_and_colons_alone(compiler: Compiler) -> None:
    """Whitespace without bounds is what small models fall into."""
    whole = Structure.json_schema({"type": "array", "items": {"type": "object", "properties": {"a": {}}}})
    for text in ('[{"a": 1}, {"a":1}]', '[{"a":1},{"a": 1}]'):
        assert takes(compiler, whole, text)
    for text in ('[ {"a":1}]', '[{"a" :1}]', '[{"a":  1}]', '[{"a":1},\n{"a":1}]', '[{"a":1}] ', "\n[]"):
        assert not takes(compiler, whole, text)


def test_an_object_of_as_many_members_as_may_be(compiler: Compiler) -> None:
    """Of members that may be left out it took 500, and said so of the first token only."""
    members = {f"p{n}": {"type": "integer"} for n in range(1000)}
    whole = Structure.json_schema({"type": "object", "properties": members, "additionalProperties": False})
    assert takes(compiler, whole, '{"p0":1, "p999":2}')
    assert not takes(compiler, whole, '{"p0":1, "p1000":2}')


def test_a_key_has_one_spelling(compiler: Compiler) -> None:
    """Else `a`, which is to be a text, could be a number under another spelling of its name."""
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": {"type": "integer"}}
    structure = Structure.json_schema(schema)
    assert takes(compiler, structure, '{"a":"x","b":1}')
    assert not takes(compiler, structure, '{"\\u0061":1}')
    assert not takes(compiler, structure, '{"a":1}')


DEEP: dict[str, Any] = {"type": "integer"}
for _ in range(40):
    DEEP = {"type": "array", "items": DEEP}

REFUSED: dict[str, tuple[Any, str]] = {
    "not": ({"not": {"type": "string"}}, r"not supported: 'not'"),
    "if": ({"properties": {"a": {"if": {}, "then": {}}}}, "not supported"),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "contains": ({"type": "array", "contains": {}}, "contains"),
    "propertyNames": ({"propertyNames": {"pattern": "a"}}, "propertyNames"),
    "dependentRequired": ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    "lenient": ({"x-guidance": {"lenient": True}, "not": {}}, "not supported"),
    "remote reference": ({"$ref": "http://localhost:1/x"}, "http://localhost:1/x"),
    "file reference": ({"$ref": "file:///etc/passwd"}, "passwd"),
    "reference to nothing": ({"$ref": "#/$defs/x"}, "does not exist"),
    "reference to itself": ({"$ref": "#"}, "refers to itself without end"),
    "references in a circle": (
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        "refers to itself without end",
    ),
    "empty enum": ({"enum": []}, "Unsatisfiable"),
    "enum of another type": ({"type": "string", "enum": [1]}, "Unsatisfiable"),
    "bounds crossed": ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
    "oneOf that overlaps": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    "unknown format": ({"type": "string", "format": "moon"}, "moon"),
    "unknown type": ({"type": "wat"}, "'wat', which JSON has not; there are object"),
    "misspelt type": ({"items": {"type": ["null", "strng"]}}, "did you mean 'string'"),
    "look-around": ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    "keys that count twice": ({"type": "object", "minProperties": 2}, "minProperties of 2"),
    "misspelt": ({"type": "object", "properties": {"a": {"minimun": 5}}}, "no keyword; did you mean 'minimum'"),
    "misspelt below": ({"$defs": {"a": {"anyOf": [{"items": {"patern": "a"}}]}}}, "did you mean 'pattern'"),
    "no schema": ({"question": "a", "answer": "b"}, "has no keyword of JSON Schema, only 'question'"),
    "control character": ({"enum": ["a\x01"]}, r"U\+0001"),
    "no JSON": ("{", "not JSON"),
    "no object": ("[1]", "no JSON object"),
    "twice": ('{"type":"object","type":"array"}', "twice"),
    "NaN": ('{"minimum":NaN}', "NaN"),
    "empty": (" ", "is empty"),
    "deep": (DEEP, "32 deep"),
    "deeper than Python": ('{"a":' * 20_000, "nested too deeply|not JSON"),
    "bytes": ({"description": "x" * 300_000}, "at most 262144"),
    "values": ({"enum": [[1] * 300] * 100}, "more than 20000 values"),
    "members": ({"properties": {f"p{n}": {} for n in range(5_000)}}, "may have 1000"),
    "alternatives": ({"enum": list(range(15_000))}, "may list 10000"),
    "counts": ({"type": "string", "maxLength": 10**9}, "maxLength"),
    "large enough to be slow": (
        {"allOf": [{"anyOf": [{"properties": {f"p{j}_{k}": {}}} for k in range(3)]} for j in range(12)]},
        "too large|takes more than",
    ),
}


def test_remarks_of_generators_are_no_misspelt_keywords(compiler: Compiler) -> None:
    """Names that are near a keyword, and somebody's own: OpenAPI's extensions, zod's ref, annotations of a user's."""
    schema = {"x-enum": [1], "x-format": "a", "ref": "User", "_type": 1, "@type": "a", "tsType": "a", "types": [1]}
    compiler.compile(Structure.json_schema({"type": "object", **schema, "properties": {"minimun": {"x-type": 1}}}))
    compiler.compile(Structure.json_schema({"x-any": True}))
    many = {f"minimum{chr(97 + n // 26)}{chr(97 + n % 26)}nowhere": 1 for n in range(600)}
    compiler.compile(Structure.json_schema({"type": "object", **many}))


def test_a_schema_that_is_given_as_a_grammar_is_told_its_place(compiler: Compiler) -> None:
    with pytest.raises(BadRequest, match="it is JSON, and no grammar; a JSON schema is given as json_schema"):
        compiler.compile(Structure.grammar('{"type": "object"}'))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused_in_one_line(compiler: Compiler, name: str) -> None:
    schema, said = REFUSED[name]
    begun = time.process_time()  # the trial's own is bounded by the system
    with pytest.raises(BadRequest, match=said) as error:
        compiler.compile(Structure.json_schema(schema))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 800
    assert time.process_time() - begun < 10


@pytest.mark.parametrize(
    "structure",
    [
        Structure.regex("("),
        Structure.regex("(?=a)b"),
        Structure.regex("\\bx"),
        Structure.regex("(" * 500 + "a" + ")*" * 500),
        Structure.grammar("nothing"),
        Structure.grammar("start: a\na: b\nb: a"),
        Structure.grammar("start: nowhere"),
        Structure.grammar("root ::= ("),
        Structure.grammar("root ::= " + "(" * 5000),
        Structure.grammar("start: <|nope|>"),
    ],
)
def test_broken_patterns_and_grammars_are_refused(compiler: Compiler, structure: Structure) -> None:
    with pytest.raises(BadRequest, match=f"this {structure.kind} cannot be followed: ") as error:
        compiler.compile(structure)
    assert "\n" not in str(error.value)


def test_what_takes_too_long_is_ended(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its own process, which is begun anew: the next one is tried as ever."""
    monkeypatch.setattr(trial._process, "seconds", 0.05)
    trial._process.close()
    slow = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(1000)}}
    with pytest.raises(BadRequest, match=r"it takes more than 0.05 s"):
        compiler.compile(Structure.json_schema(slow))
    monkeypatch.setattr(trial._process, "seconds", 1.0)
    trial._process.close()
    assert takes(compiler, Structure.json_schema({"const": 5}), "5")


def test_the_last_ones_are_kept_and_no_more(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_kept", OrderedDict())
    monkeypatch.setattr(compiled, "_KEPT", 3)
    structures = [Structure.choice([f"kept {n}"]) for n in range(4)]
    made = [compiler.compile(structure) for structure in structures[:3]]
    assert compiler.compile(Structure.choice(["kept 0"])) is made[0]
    compiler.compile(structures[3])
    assert list(compiler._kept) == [structures[2], structures[0], structures[3]]
    assert compiler.compile(structures[1]) is not made[1]


def test_threads_may_compile_at_once(compiler: Compiler) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for turn in range(8):
            if not takes(compiler, Structure.choice([f"{turn} of {number % 2}"]), f"{turn} of {number % 2}"):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_without_the_library_the_error_names_the_extra(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(PronkError, match=r"install it with: pip install 'pronk\[grammar\]'"):
        compiler.compile(Structure.choice(["not compiled yet"]))


def test_nothing_is_imported_before_a_structure_is_asked_for() -> None:
    code = (
        "import sys, pronk.llm, pronk.session; from pronk import Structure; Structure.json_object();"
        "assert not {'llguidance', 'pronk.grammar.guidance'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_matcher_says_what_went_wrong(compiler: Compiler) -> None:
    matcher = compiler.compile(Structure.choice(["ab", "ac"])).matcher([40])
    assert matcher.accepts([3 + ord(letter) for letter in "abb"]) == 2
    with pytest.raises(Ungrammatical):
        matcher.advance(3 + ord("x"))
    with pytest.raises(Ungrammatical):
        matcher.allowed()
    matcher.rollback(1)  # of no use, and no error of its own


def test_hostile_structures_leave_the_process_as_it_was(compiler: Compiler) -> None:
    """Whatever comes, the next sound one is compiled."""
    for schema in ('{"a":' * 30 + "1" + "}" * 30, '{"type":"string","pattern":"' + "a?" * 2000 + "a" * 2000 + '"}'):
        with suppress(PronkError):
            compiler.compile(Structure.json_schema(schema)).matcher([40]).allowed()
        assert takes(compiler, Structure.choice(["sound"]), "sound")
