"""`pronk pretrain` on a page of prose: what it says and leaves, how it stops, what reads it, and how it refuses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from prose import PROSE
from run_c import run_c
from training_runs import signalled

from pronk import checkpoint

Run = Callable[..., Result]

PLAIN = (
    "--vocab-size 360 --hidden 32 --layers 2 --heads 4 --kv-heads 2 --ctx 48 --steps 12 --eval-every 6 --lr 0.01 "
    "--samples 1 --device cpu"
)

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "prose.txt"
    path.write_bytes(PROSE.read_bytes())
    return str(path)


@pytest.fixture
def pretrain(run: Run, text: str, tmp_path: Path) -> Run:
    """Into tmp_path / "out", a few quick steps; what is given comes last."""

    def pretrain(*more: str, text: str = text) -> Result:
        return run("pretrain", text, "--out", str(tmp_path / "out"), *PLAIN.split(), *more)

    return pretrain


def test_a_model_that_all_others_read(pretrain: Run, run: Run, tmp_path: Path) -> None:
    """Generated from, and converted to llama2.c and GGUF: one text, which llama2.c's own program gives as well."""
    result = pretrain("--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["steps"], report["planned_steps"], report["vocabulary"]) == (12, 12, 360)
    assert report["held_out_loss"]["last"] < report["held_out_loss"]["first"] - 0.5
    assert 2 < report["bits_a_byte"] < 6
    notes = result.stderr.splitlines()
    assert notes[0].startswith("17,3")
    assert notes[0].endswith(" held out; 360 different ones, of 1.31 bytes on average")
    assert [note.split(":")[0] for note in notes[1:]] == ["step 0 of 12", "step 6 of 12", "step 12 of 12"]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    beside = {"curves.html", "samples.jsonl", "run.yaml"}
    assert names - {".lock"} == {"README.md", "metrics.jsonl", "checkpoints", "model", "loss.svg", *beside}
    model = str(tmp_path / "out" / "model")
    assert report["model_folder"] == model
    opened = checkpoint.open(model)
    assert report["parameters"] == sum(tensor.read().size for tensor in opened.tensors.values())
    (sample,) = report["samples"]
    assert sample["goes on"]

    converted = {"llama2c": str(tmp_path / "tiny.bin"), "gguf": str(tmp_path / "tiny.gguf")}
    for to, destination in converted.items():
        receipt = run("convert", model, destination, "--to", to, "--json")
        assert receipt.exit_code == 0, receipt.stderr
        beside = f"its tokenizer is beside it, in {tmp_path / 'tokenizer.bin'}\n"
        assert receipt.stderr == (beside if to == "llama2c" else "")
        assert json.loads(receipt.stdout)["max_abs_difference"] == 0
    said = {run("generate", "-m", m, "-n", "30", "-p", "The ferry").stdout for m in (model, *converted.values())}
    program = run_c(tmp_path / "tiny.bin", tmp_path / "tokenizer.bin", "The ferry", 47).decode()
    (one,) = said
    assert program.startswith("The ferry" + one.removesuffix("\n"))
    assert len(one) > 20


def test_the_report_as_text(pretrain: Run, tmp_path: Path) -> None:
    lines = pretrain("--steps", "2").stdout.splitlines()
    rows = ["trained", "examples", "steps", "loss", "held-out loss", "time", "peak memory", "folder", "bits a byte"]
    assert [line.split("  ")[0] for line in lines[:10]] == [*rows, "model"]
    assert lines[0].endswith(
        "parameters, a new LLaMA (hidden 32, 2 layers, 4 heads, 2 for keys and values, context 48) of 360 tokens"
    )
    assert any(line.startswith("  goes on") for line in lines)


def test_stopped_and_resumed(pretrain: Run, tmp_path: Path) -> None:
    """Ctrl-C and SIGTERM in the midst of a step; it ends as it would have."""
    for number, at, code in ((signal.SIGINT, 3, 130), (signal.SIGTERM, 8, 143)):
        with signalled(number, at):
            result = pretrain(*(["--resume"] if at > 3 else []))
        assert (result.exit_code, result.stdout) == (code, "")
        told = f"stopped after step {at + 1} of 12, and saved; go on with the same command and --resume"
        assert result.stderr.splitlines()[-1] == told
    resumed = json.loads(pretrain("--resume", "--json").stdout)
    (tmp_path / "out").rename(tmp_path / "first")
    whole = json.loads(pretrain("--json").stdout)
    for name in ("held_out_loss", "loss", "samples", "bits_a_byte"):
        assert resumed[name] == whole[name]
    weights = [(tmp_path / folder / "model" / "model.safetensors").read_bytes() for folder in ("first", "out")]
    assert weights[0] == weights[1]


def test_nothing_held_out_and_a_tokenizer_that_is_there(pretrain: Run, run: Run, text: str, tmp_path: Path) -> None:
    assert pretrain("--eval-share", "0", "--steps", "1", "--json").exit_code == 0
    (tmp_path / "out").rename(tmp_path / "first")
    given = [argument for argument in PLAIN.replace("--vocab-size 360 ", "").split() if argument]
    more = ["--tokenizer", str(tmp_path / "first" / "model"), "--eval-share", "0", "--steps", "1", "--json"]
    result = run("pretrain", text, "--out", str(tmp_path / "out"), *given, *more)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["vocabulary"] == 360
    assert (report["held_out_loss"], report["bits_a_byte"], report["samples"]) == (None, None, [])
    models = [tmp_path / folder / "model" for folder in ("first", "out")]
    assert models[0].joinpath("tokenizer.model").read_bytes() == models[1].joinpath("tokenizer.model").read_bytes()
    both = run("pretrain", text, "--out", str(tmp_path / "out2"), *PLAIN.split(), "--tokenizer", str(models[0]))
    assert both.exit_code == 2
    assert "leave --vocab-size out" in both.stderr


@pytest.mark.parametrize(
    ("content", "more", "message"),
    [
        (b"", [], "holds no text"),
        (b"\x7fELF\0", [], "is no text: a byte of it is 0"),
        (b"\xff\xfe", [], "not UTF-8 text (byte 0)"),
        (b"Once.", [], "too short for a vocabulary of 360 tokens"),
        (b"ab", ["--eval-share", "0.1"], "too short to hold some of it out"),
        (b"a b c d e\n" * 4, ["--vocab-size", "266"], "tokens to train on are not one sequence of 48"),
        (b"a" * 5000, ["--vocab-size", "100"], "a vocabulary of 100 tokens is too small"),
    ],
)
def test_texts_that_will_not_do(pretrain: Run, tmp_path: Path, content: bytes, more: list[str], message: str) -> None:
    (tmp_path / "text.txt").write_bytes(content)
    result = pretrain(*more, text=str(tmp_path / "text.txt"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_no_such_text(pretrain: Run, tmp_path: Path) -> None:
    result = pretrain(text=str(tmp_path / "text.txt"))
    assert result.exit_code == 1
    assert "no such file" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--hidden", "100", "--heads", "3"], "a hidden size of 100 is no multiple of 3 heads"),
        (["--hidden", "12"], "head_dim must be even"),
        (["--kv-heads", "3"], "is no multiple of num_key_value_heads"),
        (["--layers", "2000"], "num_hidden_layers must be a whole number from 1 to 1024"),
        (["--lr", "nan"], "nan"),
        (["--pack", "100"], "No such option"),
    ],
)
def test_wrong_usage(pretrain: Run, tmp_path: Path, more: list[str], message: str) -> None:
    result = pretrain(*more)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message.lower() in result.stderr.lower()
    assert not (tmp_path / "out").exists()


def test_folders_that_cannot_be(pretrain: Run, run: Run, text: str, tmp_path: Path) -> None:
    assert "name a folder for what comes out" in run("pretrain", text).stderr
    (tmp_path / "out").write_text("mine")
    assert "--out is a folder, and " in pretrain().stderr
    (tmp_path / "out").unlink()
    assert "no checkpoint to resume from" in pretrain("--resume").stderr
    assert pretrain("--steps", "1", "--samples", "0").exit_code == 0
    assert "holds a run already; go on with it (--resume)" in pretrain().stderr
    other = pretrain("--resume", "--steps", "1", "--hidden", "64")
    assert (other.exit_code, other.stdout) == (1, "")
    assert "and now it is '...(hidden 64," in other.stderr


def test_memory_that_does_not_suffice(pretrain: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before a weight is drawn."""
    monkeypatch.setattr("pronk.train.pretrain._drawn", lambda *_: 1 / 0)
    monkeypatch.setattr("pronk.system.free_memory", lambda: 8 << 20)
    result = pretrain("--hidden", "2048", "--layers", "16")
    assert result.exit_code == 1
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("pronk:"))
    assert line.startswith("pronk: the new model: training it needs 1")  # 740 million parameters, 16 bytes each
    assert " GB of memory, and 8.4 MB are free; what takes less: a smaller model (--hidden, --layers, --vocab" in line


def test_without_torch(text: str, tmp_path: Path) -> None:
    """One line, and nothing made."""
    code = "import sys; sys.modules['torch'] = None; from pronk.cli import main; sys.argv[0] = 'pronk'; main()"
    command = [sys.executable, "-c", code, "pretrain", text, "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("pronk: the torch engine needs torch")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
