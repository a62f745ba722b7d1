"""A disk that takes no more, at each thing that a run writes: one line that names it, and nothing lost.

The limit of a file's size stands for it: the system refuses what goes beyond, in the midst of a write.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tiny_folder import save_tiny_chat_model
from training_runs import run_of, write_sums

from pronk.cli import group
from pronk.errors import PronkError
from pronk.train import state
from pronk.train.curve import CURVE, draw
from pronk.train.folder import CHECKPOINTS, METRICS, forget_metrics, write_metrics
from pronk.train.settings import Settings

resource = pytest.importorskip("resource")


@contextmanager
def room_for(nbytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_sums(tmp_path / "data.jsonl", lambda a, b: {"completion": f" {a + b}."})


class Full(BytesIO):
    """A file whose disk has room for 700 bytes."""

    def write(self, piece: bytes) -> int:
        if self.tell() + len(bytes(piece)) > 700:
            raise OSError(28, "No space left on device")
        return super().write(piece)


def test_a_checkpoint_says_what_the_disk_said(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what torch finds afterwards: "unexpected pos 704 vs 598"."""
    run = run_of(Settings(str(model), str(data)), tmp_path / "run")
    run.save()
    run.loop.step()
    with room_for(20_000), pytest.raises(PronkError, match="cannot be written: File too large"):
        run.save()
    monkeypatch.setattr(state, "save_shares", lambda *_, **__: torch.save(torch.zeros(1000), Full()))
    with pytest.raises(PronkError, match="cannot be written: No space left on device"):
        run.save()
    assert [path.name for path in (run.folder / CHECKPOINTS).iterdir()] == ["step-000000"]


def test_metrics_that_cannot_be_cut_stay(tmp_path: Path) -> None:
    for step in range(1, 9):
        write_metrics(tmp_path, {"step": step, "loss": 1.0, "epoch": 0.5, "tokens": 5, "seconds": 1.0})
    before = (tmp_path / METRICS).read_bytes()
    with room_for(20), pytest.raises(PronkError, match=rf"{METRICS}: cannot be written: File too large"):
        forget_metrics(tmp_path, after=4)
    assert [path.name for path in tmp_path.iterdir()] == [METRICS]
    assert (tmp_path / METRICS).read_bytes() == before


@pytest.mark.parametrize("name", ["merged", "merged.gguf"])
def test_a_merge_names_its_destination(model: Path, data: Path, tmp_path: Path, name: str) -> None:
    """Not the hidden folder beside it, in which it is written until its receipt is good."""
    run_of(Settings(str(model), str(data)), tmp_path / "run").write()
    before = sorted(tmp_path.iterdir())
    with room_for(20_000):
        result = CliRunner().invoke(group, ["merge", str(model), str(tmp_path / "run"), str(tmp_path / name)])
    assert (result.exit_code, result.stderr) == (1, f"pronk: {tmp_path / name}: cannot be written: File too large\n")
    assert sorted(tmp_path.iterdir()) == before


def test_a_curve_that_cannot_be_drawn_costs_neither_the_last_one_nor_the_report(
    model: Path, data: Path, tmp_path: Path
) -> None:
    arguments = ["finetune", str(model), "--data", str(data), "--out", str(tmp_path / "run")]
    arguments += ["--max-steps", "2", "--samples", "0", "--device", "cpu"]
    assert CliRunner().invoke(group, arguments).exit_code == 0
    curve = tmp_path / "run" / CURVE
    before = curve.read_bytes()
    with room_for(len(before) - 1):
        result = CliRunner().invoke(group, [*arguments, "--resume"])
    assert f"{curve} cannot be drawn: File too large" in result.stderr
    assert result.exit_code == 0
    assert "held-out loss" in result.stdout
    assert curve.read_bytes() == before
    assert not list(curve.parent.glob(".*.part"))
    assert draw(curve.parent) == curve
