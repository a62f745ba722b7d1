"""`pronk outliers` on a tiny model: what it prints, draws and refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from pictures import SVG, contained
from tiny_folder import save_tiny_chat_model

from pronk import system
from pronk.measure import report, sweep

Run = Callable[..., Result]
TEXT = "It rained for three days, and the river took the bridge. " * 12
COMMON = ("--ctx", "128", "--windows", "2", "--threads", "1", "--engine", "cpu")


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


def test_a_survey(run: Run, model: str, text: str) -> None:
    found = json.loads(run("outliers", model, "--text", text, *COMMON, "--threshold", "2", "--json").stdout)
    assert (found["engine"], found["dtype"], found["threshold"]) == ("cpu", "f32", 2.0)
    assert (found["windows"], found["tokens"], len(found["inputs"])) == (2, 2 * 127, 2 * 4 + 1)
    assert found["columns"] == sum(len(one["passing"]) for one in found["inputs"] if one["layer"] >= 0)
    printed = run("outliers", model, "--text", text, *COMMON, "--threshold", "2").stdout
    assert f"over 2: {found['outliers']:,} of {found['activations']:,} activations" in printed
    assert f"254 tokens of {text}, in 2 windows of 128" in printed
    rows = [line.split() for line in printed.splitlines()]
    qkv = next(one for one in found["inputs"] if (one["layer"], one["input"]) == (1, "qkv"))
    assert ["1", str(qkv["columns"]), f"{qkv['share_of_tokens']:.1%}"] in [row[:3] for row in rows]
    first = found["top"][0]
    assert [str(first["layer"]), first["input"], str(first["column"])] in [row[:3] for row in rows]
    features = found["features"]["columns"]
    assert f"outlier features (in 25% of the layers and at 6% of the positions at least): {len(features)}\n" in printed


def test_where_nothing_passes(run: Run, model: str, text: str) -> None:
    printed = run("outliers", model, "--text", text, *COMMON, "--threshold", "1e9").stdout
    assert "over 1e+09: 0 of " in printed
    assert "the columns with the largest" not in printed
    assert printed.endswith("at least): none\n")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps whose speeds say little."""
    monkeypatch.setattr(sweep, "_PROMPT", 32)
    monkeypatch.setattr(sweep, "_NEW", 2)


@pytest.mark.usefixtures("short")
def test_a_sweep(run: Run, model: str, text: str) -> None:
    common = ("outliers", model, "--text", text, *COMMON, "--rounds", "1")
    found = json.loads(run(*common, "--sweep=0,inf", "--json").stdout)
    assert [point["threshold"] for point in found["points"]] == [0.0, "inf"]
    assert found["points"][1]["share_of_activations"] == 0.0
    printed = run(*common, "--sweep").stdout
    for threshold in (0, 1, 2, 3, 4, 6, 8, 12, "inf"):
        assert f"\nover {threshold} " in printed
    assert "\nover 6, and the 6 largest " in printed
    assert "\nknee: " in printed


@pytest.mark.usefixtures("short")
def test_on_the_torch_engine(run: Run, model: str, text: str) -> None:
    torch = ("--text", text, "--ctx", "128", "--windows", "2", "--device", "cpu", "--engine", "torch", "--json")
    ours = json.loads(run("outliers", model, "--text", text, *COMMON, "--threshold", "2", "--json").stdout)
    others = json.loads(run("outliers", model, *torch, "--threshold", "2").stdout)
    assert (others["engine"], others["dtype"], others["outliers"]) == ("torch", "f32", ours["outliers"])
    swept = json.loads(run("outliers", model, *torch, "--sweep=0,inf", "--rounds", "1").stdout)
    assert swept["engine"] == "torch"
    assert swept["points"][0]["kld"] < swept["points"][1]["kld"]


def test_a_heat_map_is_drawn(run: Run, model: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "map.svg"
    table = run(
        "outliers", model, "--text", text, *COMMON, "--threshold", "2", "--plot", str(path), "--input", "down"
    ).stdout
    root = contained(path.read_text("utf-8"))
    assert "inputs of down over 2, of 254 a cell" in path.read_text("utf-8")
    (said,) = root.iter(f"{SVG}desc")
    assert (said.text or "").strip() == table.strip()  # what the picture shows, for those who cannot see it
    assert sorted(p.name for p in tmp_path.iterdir()) == ["map.svg", "text.txt"]


@pytest.mark.usefixtures("short")
def test_a_sweep_is_drawn(run: Run, model: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "sweep.svg"
    run("outliers", model, "--text", text, *COMMON, "--sweep=0,2,inf", "--rounds", "1", "--plot", str(path))
    drawn = path.read_text()
    assert "knee: " in drawn
    assert "Speed of prefill (tokens/s)" in drawn
    assert "∞" in drawn


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sweep=6,x",), "is no list of thresholds, as in --sweep=0,3,6,inf"),
        (("--threshold", "nan"), "'nan' is no number"),
        (("--sweep=3,-1",), "a threshold is a number from 0 on, or inf"),
        (("--sweep=nan",), "a threshold is a number from 0 on, or inf"),
        (("--sweep", "--threshold", "3"), "--threshold has no part in --sweep"),
        (("--sweep", "--quantize", "bf16"), "--quantize has no part in --sweep"),
        (("--rounds", "2"), "--rounds is for --sweep"),
        (("--input", "down"), "--input is for --plot"),
        (("--plot", "map.pdf"), "name a file that ends in .svg, not map.pdf"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], message: str, run: Run, model: str) -> None:
    result = run("outliers", model, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_what_cannot_be_done_is_said_before_anything_is_measured(run: Run, tmp_path: Path) -> None:
    result = run("outliers", "no-such-model", "--plot", str(tmp_path / "nowhere" / "map.svg"))
    assert result.exit_code == 1
    assert f"{tmp_path / 'nowhere'}: there is no such folder to write map.svg to" in result.stderr


def test_where_memory_is_short_the_way_out_is_one_that_there_is(
    run: Run, model: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "free_memory", lambda: 1000)
    for arguments, way_out in (
        ((), "choose a smaller model, or keep its weights in fewer bits (--quantize bf16, or auto)"),
        (("--quantize", "auto"), "choose a smaller model"),
        (("--sweep",), "a sweep is measured from f32: choose a smaller model"),
    ):
        result = run("outliers", model, "--text", text, *COMMON, *arguments)
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
        assert result.stderr.endswith(f" of memory, and 1.0 kB are free; {way_out}\n")


def test_a_picture_that_cannot_be_written_takes_no_table_with_it(
    run: Run, model: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report, "write", full)
    result = run("outliers", model, "--text", text, *COMMON, "--plot", str(tmp_path / "map.svg"))
    assert result.exit_code == 1
    assert "outlier features" in result.stdout
    assert result.stderr == f"pronk: {tmp_path / 'map.svg'}: cannot be written: No space left on device\n"
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_a_text_shorter_than_a_window(run: Run, model: str, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Too short.")
    result = run("outliers", model, "--text", str(tmp_path / "short.txt"))
    assert result.exit_code == 1
    assert result.stderr.startswith("pronk: the text has 10 tokens, and a window takes 512")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("how", [[], ["--sweep=0,6"]])
def test_windows_longer_than_the_context(run: Run, text: str, tmp_path: Path, how: list[str]) -> None:
    """A survey once read on beyond it, where a model computes nothing that it was made for."""
    short = save_tiny_chat_model(tmp_path / "short", max_position_embeddings=64)
    result = run("outliers", str(short), "-f", text, "--ctx", "128", *how)
    assert result.exit_code == 2
    assert "--ctx is too long: 127 tokens of each window are read, and the context has 64\n" in result.stderr
    assert run("outliers", str(short), "-f", text, "--ctx", "64").exit_code == 0
