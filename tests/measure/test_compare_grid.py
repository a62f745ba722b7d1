"""A comparison of a model whose weights lie on a grid of few bits: said in the first lines, judged on a twin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_folder import save_tiny_chat_model

import pronk
from pronk import checkpoint
from pronk.checkpoint import grid
from pronk.checkpoint.rotation import rotated
from pronk.checkpoint.writers import write
from pronk.measure import compare, journal, report, tasks
from pronk.measure.comparison import ROTATION, Request
from pronk.measure.comparison_steps import _tasks_of
from pronk.measure.divergence import divergence
from pronk.measure.report.techniques import techniques
from pronk.measure.schema import problems
from pronk.measure.settle import settle
from pronk.measure.windows import evaluation_text


@pytest.fixture(scope="module")
def on_a_grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of float32 weights that were made of q4's blocks."""
    folder = tmp_path_factory.mktemp("model")
    save_tiny_chat_model(folder / "floats", max_position_embeddings=1024)
    llm = pronk.load(folder / "floats", engine="cpu", quantize="q4", threads=1)
    files = {path.name: path.read_bytes() for path in (folder / "floats").glob("tokenizer*")}
    packed = llm.backend.dequantized(llm.checkpoint)
    write.save(packed, folder / "grid", to="safetensors", dtype="f32", tokenizer_files=files)
    assert grid.find(checkpoint.open(folder / "grid")).formats == ("q4",)  # type: ignore[union-attr]
    return folder / "grid"


def asked(model: Path, **more: Any) -> Request:
    return Request(
        model=str(model), to=("q8", "q4"), against="f32", rounds=1, prefill=(8,), decode_tokens=4, windows=2,
        loading={"engine": "cpu", "threads": 1}, **more,
    )  # fmt: skip


def test_a_format_that_shares_the_grid_is_judged_on_a_rotated_twin(on_a_grid: Path, tmp_path: Path) -> None:
    """The report called q4 closer than q8, for it fell on the very numbers that the file was stored in."""
    settled, kept = compare.begin(asked(on_a_grid), tmp_path, command="pronk compare")
    assert [variant.twin for variant in settled.variants] == [False, False, True]
    assert any("lie on a grid of 4 bits" in line and "q4 is measured on a rotated twin" in line
               for line in compare.about(settled))  # fmt: skip
    compare.compare(settled, kept)
    made = json.loads((tmp_path / journal.NAME).read_text())
    assert list(problems(made)) == []
    assert made["model"]["grid"]["formats"] == ["q4"]
    own, opened = made["variants"][2]["quality"]["divergence"], checkpoint.open(on_a_grid)
    ids = pronk.load(opened, engine="cpu", threads=1).tokenizer.encode(evaluation_text())
    load = {"engine": "cpu", "threads": 1}
    reference = pronk.load(opened, quantize="f32", **load)  # type: ignore[arg-type]
    twin = divergence(reference, pronk.load(rotated(opened, ROTATION), quantize="q4", **load), ids, ctx=512, count=2)  # type: ignore[arg-type]
    file = divergence(reference, pronk.load(opened, quantize="q4", **load), ids, ctx=512, count=2)  # type: ignore[arg-type]
    assert own == twin
    assert own["mean"] > 10 * file["mean"], "on the grid q4 costs next to nothing"
    assert made["variants"][2]["memory"]["weights_measured"] < made["variants"][1]["memory"]["weights_measured"]
    table = report.render(tmp_path)
    page = (tmp_path / "REPORT.md").read_text()
    assert "of a rotated twin" in table
    assert "the quality of q4 is measured on a rotated twin" in page.split("## ")[0], "in the first lines"


def test_a_model_on_no_grid_has_no_twin(tmp_path: Path) -> None:
    model = save_tiny_chat_model(tmp_path / "tiny", max_position_embeddings=1024)
    settled = settle(asked(model))
    assert settled.grid is None
    assert not any(variant.twin for variant in settled.variants)
    assert not any("a grid of" in line for line in compare.about(settled))


def test_scores_on_tasks_stand_beside_the_originals(on_a_grid: Path) -> None:
    settled = settle(asked(on_a_grid))

    def of(scores: list[float]) -> dict[str, Any]:
        metric = {"value": sum(scores) / len(scores), "better": "higher", "scores": scores, "standard_error": 0.2}
        return {"mine": {"chat": False, "questions": len(scores), "metrics": {"acc": metric}}}

    steps = {"tasks f32": of([1.0, 0.0, 1.0, 1.0]), "tasks q8": of([1.0, 0.0, 0.0, 1.0])}
    first, second, third = (_tasks_of(settled, variant, steps) for variant in settled.variants)
    assert first is not None
    assert second is not None
    assert first["mine"]["metrics"]["acc"]["beside_original"] is None
    assert second["mine"]["metrics"]["acc"]["beside_original"] == {
        "difference": -0.25, "standard_error": pytest.approx(0.25)
    }  # fmt: skip
    assert second["mine"]["metrics"]["acc"]["scores"] is None, "the steps keep them"
    assert third is None


def test_tasks_are_run_on_every_variant(on_a_grid: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is missing: pip install 'pronk[eval]'")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    (tmp_path / "few.jsonl").write_text('{"context": "One two", "word": "three"}\n{"context": "A b", "word": "c"}\n')
    (tmp_path / "few.yaml").write_text(
        f"task: few\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path / 'few.jsonl'}}}}}\n"
        "test_split: test\noutput_type: loglikelihood\ndoc_to_text: '{{context}}'\ndoc_to_target: ' {{word}}'\n"
        "metric_list:\n  - {metric: acc, aggregation: mean, higher_is_better: true}\n"
    )
    settled, kept = compare.begin(asked(on_a_grid, tasks=(str(tmp_path / "few.yaml"),)), tmp_path / "report")
    compare.compare(settled, kept)
    made = json.loads((tmp_path / "report" / journal.NAME).read_text())
    assert made["finished"]
    assert list(problems(made)) == []
    for variant in made["variants"]:
        assert variant["tasks"]["few"]["questions"] == 2
    assert len(made["steps"]["tasks q8"]["few"]["metrics"]["acc"]["scores"]) == 2
    report.render(tmp_path / "report")
    assert "## Benchmarks" in (tmp_path / "report" / "REPORT.md").read_text()
    with pytest.raises(pronk.errors.BadRequest, match="there is no task 'nothing'"):
        settle(asked(on_a_grid, tasks=("nothing",)))
    assert tasks.OWN == ("pronk_endings", "pronk_instructions", "pronk_last_word")


def test_techniques_tell_no_quality_of_a_format_that_shares_the_grid() -> None:
    """There, q4 stood nearer to f32 than q8."""
    seconds = {"median": 1.0, "min": 1.0, "max": 1.0, "rounds": [1.0]}
    ways = {name: {"seconds": seconds, "kld": kld, "kld_error": 1e-4, "same_texts": 3, "texts": 5}
            for name, kld in (("f32", 0.0), ("q8", 0.0029), ("q4", 0.0018))}  # fmt: skip
    technique = {
        "name": "quantization",
        "title": "Quantization",
        "what": "",
        "points": [{"setting": "a", "ways": ways}],
    }
    shown = []
    for formats in (["q4"], []):
        (found,) = techniques({"model": {"grid": {"formats": formats}}, "techniques": [technique]})
        assert found.table
        (kld,) = (cells for label, cells in found.table.lines if "KLD" in label)
        shown.append([cell.value for cell in kld])
    assert shown == [["0", "0.00290", "—"], ["0", "0.00290", "0.00180"]]
