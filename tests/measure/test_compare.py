"""A comparison from end to end on a tiny model: the order, what is kept when it is cut short, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from tiny_folder import save_tiny_chat_model

import pronk
from pronk import strict_json, torch_engine
from pronk.cpu_engine import CpuEngine
from pronk.engine.declaration import Plan
from pronk.errors import BadFile, BadRequest, PronkError
from pronk.measure import compare, journal
from pronk.measure import settle as settling
from pronk.measure.comparison import Request
from pronk.measure.divergence import divergence
from pronk.measure.perplexity import beside, perplexity
from pronk.measure.schema import problems
from pronk.measure.settle import settle
from pronk.measure.windows import evaluation_text
from pronk.measure.worker import Worker, WorkerDied


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def request_(model: str) -> Request:
    return Request(
        model=model, to=("q8",), rounds=3, prefill=(8, 40), decode_tokens=4, windows=1,
        loading={"threads": 1, "engine": "cpu"},
    )  # fmt: skip


@dataclass
class Done:
    """A comparison that ran to its end."""

    folder: Path
    report: dict[str, Any]
    told: list[tuple[str, int, int]]


@pytest.fixture(scope="module")
def done(request_: Request, tmp_path_factory: pytest.TempPathFactory) -> Done:
    folder = tmp_path_factory.mktemp("done") / "new" / "report"
    told: list[tuple[str, int, int]] = []
    report = run(request_, folder, progress=lambda *what: told.append(what))
    return Done(folder, report, told)


def run(request: Request, folder: Path, *, resume: bool = False, **how: Any) -> dict[str, Any]:
    settled, kept = compare.begin(request, folder, resume=resume, command="pronk compare")
    compare.compare(settled, kept, **how)
    report: dict[str, Any] = json.loads(kept.path.read_text())
    return report


def test_the_text_is_read_as_pronk_perplexity_and_divergence_read_it(done: Done, model: str) -> None:
    load = partial(pronk.load, model, engine="cpu", threads=1)
    one, other = load(quantize="f32"), load(quantize="q8")
    ids = one.tokenizer.encode(evaluation_text())
    quality = done.report["variants"][1]["quality"]
    first, second = (perplexity(llm, ids, ctx=512, count=1) for llm in (load(quantize="bf16"), other))
    assert quality["perplexity"] == {**second, "beside_original": beside(first, second)}
    assert "beside_original" not in done.report["variants"][0]["quality"]["perplexity"]
    assert quality["divergence"] == divergence(one, other, ids, ctx=512, count=1)


def test_a_newline_at_its_end_is_no_part_of_a_text(request_: Request, tmp_path: Path) -> None:
    """As for the other verbs."""
    (tmp_path / "text").write_text("It rained. " * 60 + "\n")
    assert list(settle(replace(request_, text=str(tmp_path / "text"))).ids) == [
        b + 3 for b in encoded("It rained. " * 60)
    ]


def test_it_begins_with_the_token_that_texts_begin_with(request_: Request, tmp_path: Path) -> None:
    """And prompts, which are pieces of it, have that once."""
    folder = save_tiny_chat_model(tmp_path / "tiny")
    file = folder / "tokenizer.json"
    raw = json.loads(file.read_text())
    raw["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    file.write_text(json.dumps(raw))
    settled = settle(replace(request_, model=str(folder)))
    assert settled.begin == (1,)
    assert list(settled.ids) == [1, *(b + 3 for b in encoded(evaluation_text()))]
    for prompt in (*settled.prompts(0), settled.piece(len(settled.ids), 5)):
        assert (prompt[0], prompt.count(1)) == (1, 1)
    assert settled.piece(len(settled.ids), 5) == list(settled.ids)
    assert settled.piece(1, 9) == [1]


def encoded(text: str) -> list[int]:
    """A byte a token, numbered as GPT-2's letters for bytes are in order."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    pieces = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    return [letters.index(letter) for piece, _ in pieces for letter in piece]


def test_a_report_is_whole(done: Done) -> None:
    report = done.report
    assert list(problems(report)) == []
    assert report["finished"]
    assert report["missing"] == []
    # Nobody always goes first.
    latency = [step.removeprefix("latency ") for step in report["steps"] if step.startswith("latency")]
    assert latency == ["bf16 1", "q8 1", "q8 2", "bf16 2", "bf16 3", "q8 3"]
    original, own = report["variants"]
    assert (original["name"], original["original"], own["name"], own["original"]) == ("bf16", True, "q8", False)
    for variant in (original, own):
        assert [entry["tokens"] for entry in variant["latency"]["prefill"]] == [8, 40]
        assert len(variant["latency"]["ttft_ms"]["rounds"]) == 3
        memory = variant["memory"]
        assert memory["baseline_rss"] < memory["loaded_rss"] <= memory["peak_rss"]
        # Of a tiny model the process is nearly all; a large one's figures are in the repository's own report.
        assert memory["total_predicted"] == pytest.approx(memory["peak_rss"], rel=0.15)
    assert 0 < original["quality"]["divergence"]["mean"] < own["quality"]["divergence"]["mean"]
    assert own["quality"]["divergence"]["rows"] == own["quality"]["perplexity"]["rows"] == 255
    assert original["quality"]["texts"]["greedy"]["equal_share"] == 1
    assert len(report["texts"]) == 12
    assert report["texts"][0]["outputs"].keys() == {"bf16", "q8"}
    assert [path.name for path in done.folder.iterdir()] == ["report.json"]


def test_it_tells_how_far_it_is_and_never_backwards(done: Done) -> None:
    assert len({total for *_, total in done.told}) == 1
    parts = [part for _, part, _ in done.told]
    assert parts == sorted(parts)


def test_prompts_are_fresh_and_the_same_for_all(request_: Request) -> None:
    settled = settle(request_)
    every = [tuple(prompt) for number in range(3) for prompt in settled.prompts(number)]
    assert len(set(every)) == len(every)
    assert [len(prompt) for prompt in every] == [8, 40] * 3
    pieces = {tuple(settled.ids[at : at + 40]) for at in range(len(settled.ids) - 39)}
    assert set(every[1::2]) <= pieces  # and of the text, not made up


def interrupt_at(step: str) -> Callable[[str, int, int], None]:
    def progress(what: str, done: int, total: int) -> None:
        if what == step:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize("at", ["q8, round 2 of 3", "noise floor of bf16"])
def test_what_was_finished_is_kept_and_gone_on_with(request_: Request, tmp_path: Path, at: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(request_, tmp_path, progress=interrupt_at(at))
    half = json.loads((tmp_path / journal.NAME).read_text())
    assert not half["finished"]
    assert list(problems(half)) == []
    whole = run(Request(), tmp_path, resume=True)
    assert whole["finished"]
    assert list(problems(whole)) == []
    assert {step: whole["steps"][step] for step in half["steps"]} == half["steps"]
    assert whole["settings"] == half["settings"]
    assert whole["command"] == "pronk compare"


def test_a_finished_one_is_not_measured_again(request_: Request, done: Done, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "Worker", None)  # nobody is needed any more
    again = run(request_, done.folder, resume=True)
    assert {**again, "made": 0} == {**done.report, "made": 0}


def test_a_worker_that_dies_ends_it_in_a_line(
    request_: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    class Doomed(Worker):
        def call(self, function: Any, **how: Any) -> Any:
            nonlocal calls
            calls += _asked(function, how) == "one_round"
            if calls == 2:
                self.process.kill()
            return super().call(function, **how)

    monkeypatch.setattr(journal, "Worker", Doomed)
    with pytest.raises(WorkerDied, match=r"^q8: the process that measured it ended: killed by signal 9"):
        run(replace(request_, rounds=1), tmp_path)
    assert list(json.loads((tmp_path / journal.NAME).read_text())["steps"]) == ["latency bf16 1"]
    monkeypatch.setattr(journal, "Worker", Worker)
    assert run(Request(), tmp_path, resume=True)["finished"]


def test_variants_that_do_not_fit_side_by_side_are_measured_one_by_one(
    request_: Request, done: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model of 7B their quality was not measured."""
    monkeypatch.setattr(settling, "_baseline", lambda: 500_000_000)
    settled = settle(request_)
    need = max(v.peak(settling._baseline(), 44) for v in settled.variants)
    monkeypatch.setattr(settling.system, "free_memory", lambda: int(1.6 * need))
    settled = settle(replace(request_, rounds=1))
    assert not settled.together
    assert settled.missing == ()
    alive: list[Worker] = []
    most = 0

    class Counted(Worker):
        def call(self, function: Any, **how: Any) -> Any:
            nonlocal most
            alive.append(self)
            most = max(most, len({id(one) for one in alive if one.process.is_alive()}))
            return super().call(function, **how)

    monkeypatch.setattr(journal, "Worker", Counted)
    report = run(replace(request_, rounds=2), tmp_path)
    assert most == 1
    assert report["finished"]
    assert list(problems(report)) == []
    assert [variant["quality"] for variant in report["variants"]] == [
        variant["quality"] for variant in done.report["variants"]
    ]
    assert [path.name for path in tmp_path.iterdir()] == [journal.NAME]  # nothing of the reference is left


def test_what_the_reference_predicts_is_read_once_and_kept_until_the_end(
    request_: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Doomed(Worker):
        def call(self, function: Any, **how: Any) -> Any:
            asked.append(_asked(function, how))
            if asked.count("divergence_from") == 2:
                self.process.kill()
            return super().call(function, **how)

    monkeypatch.setattr(journal, "Worker", Doomed)
    with pytest.raises(WorkerDied, match="measured it ended"):
        run(replace(request_, rounds=1), tmp_path)
    settled, kept = settle(request_), tmp_path / ".reference.logits"
    assert kept.stat().st_size == settled.kept_bytes
    monkeypatch.setattr(journal, "Worker", _counted(asked := []))
    assert run(Request(), tmp_path, resume=True)["finished"]
    assert "record" not in asked
    assert asked.count("divergence_from") == 1
    assert not kept.exists()


def test_a_reference_that_is_gone_is_read_again(
    request_: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Doomed(Worker):
        def call(self, function: Any, **how: Any) -> Any:
            if _asked(function, how) == "divergence_from":
                self.process.kill()
            return super().call(function, **how)

    monkeypatch.setattr(journal, "Worker", Doomed)
    with pytest.raises(WorkerDied):
        run(replace(request_, rounds=1), tmp_path)
    (tmp_path / ".reference.logits").unlink()
    asked: list[str] = []
    monkeypatch.setattr(journal, "Worker", _counted(asked))
    assert run(Request(), tmp_path, resume=True)["finished"]
    assert asked.count("record") == 1


def _counted(asked: list[str]) -> type[Worker]:
    class Counted(Worker):
        def call(self, function: Any, **how: Any) -> Any:
            asked.append(_asked(function, how))
            return super().call(function, **how)

    return Counted


def _asked(function: Any, how: dict[str, Any]) -> str:
    name: str = how.get("apply", function).__name__
    return name


def test_a_disk_without_room_is_noticed_before_anything_is_measured(
    request_: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(PronkError, match=r"of disk while variants are measured, and 1.0 kB are free"):
        compare.begin(request_, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_disk_filled_by_the_recording_that_is_gone_on_with_is_no_obstacle(
    request_: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: --resume asked for the room of the reference's logits anew, while they lay there already."""
    comparison, _ = compare.begin(request_, tmp_path)
    kept = tmp_path / ".reference.logits"
    kept.write_bytes(bytes(comparison.kept_bytes))
    monkeypatch.setattr(compare.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    compare.begin(request_, tmp_path)
    kept.write_bytes(bytes(comparison.kept_bytes // 2))
    with pytest.raises(PronkError, match="of disk while variants are measured"):
        compare.begin(request_, tmp_path)


def test_without_room_for_f32_the_original_is_the_reference(request_: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    def predicted(engine: Any, checkpoint: Any, options: Any) -> Plan:
        return Plan("", 4_000_000_000 if options.get("quantize") == "f32" else 1_000_000, "", 1, 1)

    monkeypatch.setattr(CpuEngine, "plan", predicted)
    monkeypatch.setattr(settling.system, "free_memory", lambda: 3_000_000_000)
    monkeypatch.setattr(settling, "_baseline", lambda: 100_000_000)  # not what tests before this one have left
    settled = settle(request_)
    assert settled.reference is not None
    assert settled.reference.name == "bf16"
    assert settled.missing == ("f32 does not fit into memory: quality is held against bf16",)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"to": ("q5",)}, "'q5' is no format; there are auto, f32"),
        ({"to": ("absmax",)}, "the cpu engine has no absmax"),
        ({"to": ("bf16",)}, "bf16 is the original itself"),
        ({"prefill": (1021,)}, "exceed the context of 1024"),
        ({"prefill": tuple(range(1, 40))}, "39 lengths of prompts are more than a report has room for; name 32"),
        ({"windows": 1000}, "which is 48 windows of 512 and not 1000"),
        ({"loading": {"int8_threshold": 5.0}}, "are llm-int8's"),
        ({"loading": {"kv_dtype": "int8", "engine": "torch"}}, "kv_dtype='int8' is not for the torch engine"),
        ({"text": "nowhere.txt"}, "nowhere.txt: No such file"),
        ({"loading": {"ctx_size": 16}, "decode_tokens": 16, "prefill": None}, "exceed the context of 16"),
    ],
)
def test_what_cannot_be_is_said_before_anything_begins(
    request_: Request, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(BadRequest, match=says):
        compare.begin(replace(request_, **changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_too_large_for_memory(request_: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling.system, "free_memory", lambda: 1_000_000)
    with pytest.raises(PronkError, match=r"as bf16 needs .* of memory, and 1.0 MB are free; compare it in fewer bits"):
        settle(request_)


def test_a_text_too_short(request_: Request, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Once upon a time.")
    with pytest.raises(BadRequest, match="the text has 17 tokens, fewer than a window of 512"):
        settle(replace(request_, text=str(tmp_path / "short.txt")))


def test_folders_that_cannot_be_written_to(request_: Request, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadRequest, match=r"file: a report cannot be written there: .*file: is no folder"):
        compare.begin(request_, tmp_path / "file")
    with pytest.raises(BadRequest, match=r"report\.json is absent: there is nothing to go on with"):
        compare.begin(request_, tmp_path, resume=True)
    (tmp_path / journal.NAME).write_text("{}")
    with pytest.raises(BadRequest, match=r"report\.json exists; go on with it"):
        compare.begin(request_, tmp_path)
    with pytest.raises(BadFile, match=r"is no report of this version .*; begin anew \(--overwrite\), or elsewhere"):
        compare.begin(request_, tmp_path, resume=True)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda report: "{", "at byte 1: not JSON"),
        (lambda report: json.dumps(report)[:-40], "not JSON"),
        (lambda report: json.dumps({**report, "machine": 3}), "is damaged: report.machine is a int"),
        (lambda report: json.dumps({**report, "settings": {**report["settings"], "asked": None}}), "asked"),
        (lambda report: json.dumps({**report, "steps": {"perplexity q8": 1, "latency q8 1": {}}}), "steps: is damaged"),
    ],
)
def test_a_damaged_report_says_how_to_go_on(
    done: Done, tmp_path: Path, damage: Callable[[Any], str], says: str
) -> None:
    (tmp_path / journal.NAME).write_text(damage(done.report))
    with pytest.raises(BadFile, match=says) as failure:
        compare.begin(Request(), tmp_path, resume=True)
    assert str(failure.value).endswith("; begin anew (--overwrite), or elsewhere (--out)")


def test_going_on_with_other_settings_is_refused_by_name(request_: Request, tmp_path: Path, model: str) -> None:
    _, kept = compare.begin(request_, tmp_path)
    kept.write()
    for changes, says in (
        ({"rounds": 4}, "--rounds is 4 now, but the report was begun with 3"),
        ({"tasks": ("mine",)}, "--tasks is mine now, but the report was begun with none"),
        ({"to": ("q4",)}, "--to is q4 now, but the report was begun with q8"),
        ({"loading": {"threads": 2}}, "--threads is 2 now"),
        ({"loading": {"kv_dtype": "int8"}}, "--kv-dtype is int8 now, but the report was begun with the default"),
    ):
        with pytest.raises(BadRequest, match=says):
            compare.begin(Request(**changes), tmp_path, resume=True)  # type: ignore[arg-type]
    settled, _ = compare.begin(Request(techniques=True), tmp_path, resume=True)
    assert settled.request.techniques
    assert settled.compares
    for path, value, says in (
        (("machine", "cpu"), "a better one", "on another machine"),
        (("settings", "text_sha256"), "0", "with another text"),
        (("provenance", "model_sha256"), {"model.safetensors": "0"}, "with another model"),
        (("pronk",), "0.0", "by another version of pronk"),
    ):
        report = kept.report()
        place = report
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value
        kept.path.write_text(json.dumps(strict_json.finite(report)))
        with pytest.raises(BadRequest, match=f"was begun {says}"):
            compare.begin(Request(), tmp_path, resume=True)


def test_a_model_of_the_same_size_with_other_weights_is_not_gone_on_with(request_: Request, tmp_path: Path) -> None:
    """Regression: what the reference of another training had predicted was taken for this one's."""
    folder = save_tiny_chat_model(tmp_path / "tiny")
    _, kept = compare.begin(replace(request_, model=str(folder)), tmp_path / "report")
    kept.write()
    assert compare.begin(Request(), tmp_path / "report", resume=True)
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(BadRequest, match="was begun with another model"):
        compare.begin(Request(), tmp_path / "report", resume=True)


def test_a_report_does_not_say_whose_home_it_was_made_in(request_: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(request_.model or "").resolve()
    monkeypatch.setenv("HOME", str(folder.parents[1]))
    assert settle(request_).about_model()["path"] == f"~/{folder.parent.name}/tiny"


def test_a_gpu_is_asked_what_it_has(request_: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    from pronk.torch_engine import device_memory

    monkeypatch.setattr(torch_engine.TorchEngine, "has_gpu", lambda _: True)
    monkeypatch.setattr(device_memory, "free", lambda device: 123 if device == "cuda:1" else 0)
    assert torch_engine.ENGINE.free_memory("cuda:1") == 123
    monkeypatch.setattr(settling.system, "free_memory", lambda: 77)
    assert torch_engine.ENGINE.free_memory("cpu") == 77
    with pytest.raises(PronkError, match="123 B are free"):
        settle(replace(request_, to=("int8",), loading={"engine": "torch", "device": "cuda:1"}))


def test_a_request_survives_json(request_: Request) -> None:
    endless = replace(request_, loading={"int8_threshold": float("inf"), "threads": 2})
    for request in (request_, endless, Request()):
        assert Request.of(json.loads(json.dumps(request.asdict(), allow_nan=False))) == request


def test_problems_are_found(request_: Request, tmp_path: Path) -> None:
    """The inverse: a report that breaks the schema in one place is said to, at that place."""
    _, kept = compare.begin(request_, tmp_path)
    report = kept.report()
    assert list(problems(report)) == []
    report["variants"][0]["memory"]["kv_a_token"] = "many"
    report["settings"]["rounds"] = True
    del report["machine"]
    assert list(problems(report)) == [
        "report.machine is null or absent and no object",
        "report.settings.rounds is a bool",
        "report.variants[0].memory.kv_a_token is a str",
    ]


def test_no_number_is_null_in_json() -> None:
    assert strict_json.finite({"a": [float("nan"), (1.5, float("inf"))]}) == {"a": [None, [1.5, None]]}


def empty(path: Path) -> journal.Journal:
    return journal.Journal(path, [], lambda begun, steps: {}, {"command": ""})


def test_a_step_that_could_not_be_written_is_not_said_to_be_kept(tmp_path: Path) -> None:
    """A disk full from the first step on once made pronk compare tell people to go on with a file there was not."""
    (tmp_path / "file").touch()
    book = empty(tmp_path / "file" / "report.json")
    with pytest.raises(PronkError, match="cannot be written"):
        book.record("one", 1)
    assert book.steps == {}


@pytest.mark.parametrize("begun", [False, True])
def test_of_two_that_write_to_one_folder_the_second_is_told(tmp_path: Path, begun: bool) -> None:
    """Both once ended as if all were well, and the report was that of whoever wrote last."""
    if begun:  # both go on with it
        (tmp_path / journal.NAME).write_text("{}")
    first, second = (empty(tmp_path / journal.NAME) for _ in range(2))
    first.record("one", 1)
    first.record("two", 2)
    with pytest.raises(PronkError, match="another process writes here, too"):
        second.record("other", 3)
    assert second.steps == {}
    first.record("three", 3)
    assert first.write()["steps"] == strict_json.read(tmp_path / journal.NAME)["steps"]
    assert list(strict_json.read(tmp_path / journal.NAME)["steps"]) == ["one", "two", "three"]
    (tmp_path / journal.NAME).unlink()
    first.record("four", 4)
    assert len(strict_json.read(tmp_path / journal.NAME)["steps"]) == 4
