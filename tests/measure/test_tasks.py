"""Tasks: the questions that come with pronk, the rules that answers keep, and scores beside the harness's own model."""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripts import script
from tiny_folder import save_tiny_chat_model

from pronk.errors import BadRequest
from pronk.measure import tasks
from pronk.measure.benchmarks import checks

ROOT = Path(__file__).resolve().parents[2]
WIKITEXT = ROOT.parent / "shared" / "data" / "wikitext-2" / "test.txt"


def questions(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress((tasks.FOLDER / f"{name}.jsonl.gz").read_bytes()).splitlines()]


@pytest.mark.skipif(not WIKITEXT.exists(), reason="needs WikiText-2's test split")
def test_the_questions_are_the_scripts() -> None:
    made = script(ROOT / "bench" / "make_benchmarks.py")
    articles = made.articles(WIKITEXT.read_text(encoding="utf-8"))
    assert made.last_words(articles, random.Random("pronk last_word")) == questions("last_word")
    assert made.endings(articles, random.Random("pronk endings")) == questions("endings")


def test_questions_are_what_they_say() -> None:
    for question in questions("last_word"):
        sentences = re.split(r"(?<=[.!?\"]) ", question["context"])
        assert len(sentences) > 1
        assert re.search(rf"\b{question['word']}\b", question["context"])
        assert not question["context"].endswith(" ")
    for question in questions("endings"):
        assert len(set(question["endings"])) == 4
        assert question["label"] in range(4)
        assert not any(ending in question["context"] for ending in question["endings"])
    assert len({question["prompt"] for question in questions("instructions")}) == len(questions("instructions"))
    table = (tasks.FOLDER / "README.md").read_text()
    for name in ("last_word", "endings", "instructions"):
        assert f"| `pronk_{name}` | {len(questions(name))} |" in table


ANSWERS = {
    "What is the capital of France? Answer with one word.": (["Paris", " paris.\n"], ["It is Paris.", "", "Lyon"]),
    "How much is 6 plus 7? Answer with a number only.": (["13", "13."], ["6 + 7 = 13", "113"]),
    "Repeat this text and write nothing else: pronk, pronk, pronk": (["pronk, pronk, pronk"], ["pronk, pronk"]),
    "Write one sentence about bread.": (["Bread is baked."], ["Bread is baked. It is eaten.", ""]),
    "Write about winter in at most 20 words.": (["Cold and white."], ["", "word " * 21]),
    "What is a river? Use at least 60 words.": (["word " * 60], ["word " * 59]),
    'Name 3 fruits as a list with one bullet point on each line. Begin each line with "- " and write nothing else.': (
        ["- apple\n- pear\n- fig", "- a\n\n- b\n- c\n"],
        ["1. apple\n2. pear\n3. fig", "- apple\n- pear", "Here:\n- apple\n- pear"],
    ),
    "Write a short text about a dog. Use small letters only, no capital letters.": (
        ["a dog. it barks."],
        ["A dog.", ""],
    ),
    'Write two sentences about rain. Use the word "because".': (["It rains. Because."], ["It rains. It becauses."]),
    'Write two sentences about cooking. Do not use the word "the".': (
        ["One cooks and another eats."],
        ["The cook.", ""],
    ),
    "Tell me something about birds. End your answer with exactly this: The end.": (
        ["They fly.\nThe end."],
        ["The end."],
    ),
    "Write a short letter about a garden. Begin your answer with exactly this: Well,": (
        ["Well, it grows."],
        ["It grows."],
    ),
    'Answer with a JSON object and nothing else. It has two keys, "name" and "age", with values that you make up.': (
        ['{"name": "A", "age": 1}', '```json\n{"age": 1, "name": "A"}\n```'],
        ['{"name": "A"}', "name: A", '[{"name": "A", "age": 1}]', '{"name": "A", "age": 1, "c": 2}'],
    ),
}


@pytest.mark.parametrize("prompt", ANSWERS)
def test_an_answer_keeps_its_rule_or_not(prompt: str) -> None:
    (rule,) = (question for question in questions("instructions") if question["prompt"] == prompt)
    good, bad = ANSWERS[prompt]
    assert [checks.follows(rule, answer) for answer in good] == [True] * len(good)
    assert [checks.follows(rule, answer) for answer in bad] == [False] * len(bad)


def test_every_rule_can_be_broken() -> None:
    """A rule whose parts get lost is kept by anything: so it was where the first question's keys were taken for all."""
    for rule in questions("instructions"):
        nonsense = [
            "",
            "Ich?",
            "one\ntwo\nthree\nfour\nfive\nsix.",
            "I AM A 7.\nTHE WATER CAT",
            "no " * 19 + "Capital the water cat",
        ]
        assert not all(checks.follows(rule, answer) for answer in nonsense), rule["prompt"]
        assert set(rule) - {"prompt"} <= set(checks._KEEPS)


def test_differences_are_taken_question_by_question() -> None:
    before = {"value": 0.5, "scores": [0.0, 1.0, 0.0, 1.0]}
    after = {"value": 0.75, "scores": [0.0, 1.0, 1.0, 1.0]}
    found = tasks.paired(before, after)
    assert found == {"difference": 0.25, "standard_error": pytest.approx(0.25)}  # sd of 0, 0, 1, 0 over sqrt(4)
    assert tasks.paired(before, {"value": 3.0, "scores": None}) is None
    assert tasks.paired(before, {"value": 0.5, "scores": [0.5]}) is None


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:  # read when datasets is imported
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        yield pytest.importorskip("lm_eval", reason="lm-evaluation-harness is missing: pip install 'pronk[eval]'")


def test_all_questions_reach_the_harness_whole(harness: Any) -> None:
    for name in ("last_word", "endings", "instructions"):
        given = [dict(one) for one in getattr(checks, name)()["test"]]
        kept = [{key: value for key, value in one.items() if value is not None} for one in given]
        assert kept == questions(name)


@pytest.mark.filterwarnings("ignore")
def test_scores_are_those_of_the_harnesss_hugging_face_model(harness: Any, tmp_path: Path) -> None:
    import pronk

    transformers = pytest.importorskip("lm_eval.models.huggingface")
    folder = str(save_tiny_chat_model(tmp_path / "tiny", max_position_embeddings=2048))
    llm = pronk.load(folder, engine="cpu", threads=1, quantize="f32")
    told: list[tuple[str, int, int]] = []
    ours = tasks.evaluate(llm, tasks.OWN, limit=6, progress=lambda *what: told.append(what))
    assert told[-1][1] == told[-1][2]
    theirs = transformers.HFLM(pretrained=folder, device="cpu", dtype="float32", batch_size=1)
    manager = harness.tasks.TaskManager(include_path=str(tasks.FOLDER), include_defaults=False)
    for name in tasks.OWN:
        made = harness.simple_evaluate(
            theirs,
            tasks=[name],
            limit=6,
            task_manager=manager,
            bootstrap_iters=0,
            apply_chat_template=ours[name]["chat"],
        )
        assert ours[name]["questions"] == 6
        for metric, found in ours[name]["metrics"].items():
            assert found["value"] == pytest.approx(made["results"][name][f"{metric},none"], rel=1e-4), (name, metric)
            if found["scores"]:
                assert found["scores"] == [float(sample[metric]) for sample in made["samples"][name]]
    assert {name for name in tasks.OWN if ours[name]["chat"]} == {"pronk_instructions"}


def test_a_task_that_there_is_not(harness: Any, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"no task file at .*mine\.yaml"):
        tasks.check([str(tmp_path / "mine.yaml")])
    (tmp_path / "mine.yaml").write_text(
        (tasks.FOLDER / "pronk_endings.yaml").read_text().replace("pronk_endings", "other")
    )
    tasks.check([str(tmp_path / "mine.yaml")])  # by the name that it has inside
    for broken in ("", "metadata: {version: 1}\n", ": : {\n"):
        (tmp_path / "mine.yaml").write_text(broken)
        with pytest.raises(BadRequest, match="no task file of lm-evaluation-harness"):
            tasks.check([str(tmp_path / "mine.yaml")])
