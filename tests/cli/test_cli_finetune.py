"""`pronk finetune` on a tiny model: what it says and leaves, how it stops, and how it refuses."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import Result
from pictures import contained
from tiny_folder import save_tiny_chat_model
from training_runs import QUICK, signalled, write_sums

from pronk import checkpoint
from pronk.checkpoint import adapter

Run = Callable[..., Result]

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=256))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    return str(write_sums(path, lambda a, b: {"completion": f" {a + b}."}))


@pytest.fixture
def finetune(run: Run, model: str, data: str, tmp_path: Path) -> Run:
    """Into tmp_path / "out", a few quick steps; what is given comes last."""

    def finetune(*more: str, data: str = data) -> Result:
        return run("finetune", model, "--data", data, "--out", str(tmp_path / "out"), *QUICK, *more)

    return finetune


def test_an_adapter_and_a_report(finetune: Run, run: Run, model: str, tmp_path: Path) -> None:
    result = finetune("--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["steps"], report["planned_steps"], report["method"]) == (6, 6, "LoRA")
    assert (report["examples"], report["out"]) == ({"train": 18, "held_out": 2}, str(tmp_path / "out"))
    assert report["held_out_loss"]["last"] < report["held_out_loss"]["first"]
    assert report["peak_bytes"] > 1e7
    (sample,) = report["samples"]
    assert sample["prompt"].endswith(" is")
    assert sample["data"].endswith(".")
    assert sample["before"] != sample["after"]
    notes = result.stderr.splitlines()
    assert [note.split(":")[0] for note in notes] == ["step 0 of 6", "step 3 of 6", "step 6 of 6"]
    assert adapter.read_config(tmp_path / "out")[0].rank == 4
    names = {path.name for path in (tmp_path / "out").iterdir()}
    tokenizer = {"tokenizer.json", "tokenizer_config.json"}
    own = {
        adapter.CONFIG,
        adapter.WEIGHTS,
        "README.md",
        "metrics.jsonl",
        "checkpoints",
        "loss.svg",
        "run.yaml",
        "curves.html",
        "samples.jsonl",
    }
    assert names - {".lock"} == own | tokenizer
    said = run("generate", "-m", model, "--adapter", str(tmp_path / "out"), "-n", "64", "-p", sample["prompt"])
    assert said.exit_code == 0, said.stderr
    assert said.stdout.strip() == sample["after"]


def test_the_report_as_text_with_a_curve(finetune: Run, tmp_path: Path) -> None:
    lines = finetune().stdout.splitlines()
    rows = ["trained", "examples", "steps", "loss", "held-out loss", "time", "peak memory", "folder"]
    assert [line.split("  ")[0] for line in lines[:8]] == rows
    assert [line.split()[0] for line in lines[-3:]] == ["before", "after", "data"]
    contained((tmp_path / "out" / "loss.svg").read_text("utf-8"))


@pytest.mark.parametrize("instructions", ["chat", "alpaca"])
@pytest.mark.parametrize("full", [False, True])
def test_what_was_trained_through_a_template_is_asked_through_it(
    finetune: Run,
    run: Run,
    model: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    instructions: str,
    full: bool,
) -> None:
    """The last step of the documentation, generate --adapter, gave bare text to what had never seen any."""
    import pronk
    from pronk.train.objectives.sft import alpaca_prompt

    path = records(tmp_path, '{"instruction": "Sing.", "output": "La"}')
    more = ["--max-steps", "1", "--samples", "0", "--instructions", instructions]
    if full:
        result = run("finetune", model, "--data", path, "--out", str(tmp_path / "out"), "--full", *more)
        loading = {"model": str(tmp_path / "out" / "model")}
    else:
        result = finetune(*more, data=path)
        loading = {"model": model, "adapter": str(tmp_path / "out")}
    assert result.exit_code == 0, result.stderr
    llm = pronk.load(**loading)  # type: ignore[arg-type]
    asked = llm.tokenizer.encode(
        alpaca_prompt({"instruction": "Sing."}) if instructions == "alpaca" else "<s>user:Sing.</s><s>assistant:",
        bos=False,
    )
    assert llm.chat_prompt([{"role": "user", "content": "Sing."}]) == asked
    expected = "".join(chunk.text for chunk in llm.stream(asked, max_new_tokens=5))
    assert "".join(chunk.text for chunk in llm.stream("Sing.", chat=True, max_new_tokens=5)) == expected
    options = [word for name, value in loading.items() for word in (f"--{name}", value)]
    said = run("generate", *options, "-n", "5", "--chat", "Sing.")
    assert said.stdout == expected + "\n"
    bare = run("generate", *options, "-n", "5", "Sing.")
    note = "was trained through a chat template, and is given bare text; --chat asks through it"
    assert bare.stderr.count("bare text") == (not full)
    assert (note in bare.stderr) is not full
    assert note not in said.stderr
    in_python = "given bare text; chat=True asks through it"
    llm.generate(asked, max_new_tokens=1)
    llm.generate("x", chat=True, max_new_tokens=1)
    assert in_python not in caplog.text
    for _ in range(2):
        llm.generate("Sing.", max_new_tokens=1)
    assert caplog.text.count(in_python) == (not full)


def test_an_adapter_of_bare_texts_brings_no_template(finetune: Run, run: Run, model: str, tmp_path: Path) -> None:
    assert finetune("--max-steps", "1", "--samples", "0").exit_code == 0
    assert not (tmp_path / "out" / "chat_template.jinja").exists()
    bare = run("generate", "-m", model, "--adapter", str(tmp_path / "out"), "-n", "1", "Sing.")
    assert "template" not in bare.stderr


def test_a_model_given_as_an_adapter_is_called_none_of_that(run: Run, model: str) -> None:
    """It "was trained through a chat template", and then it was no adapter."""
    wrong = run("generate", "-m", model, "--adapter", model, "-n", "1", "Sing.")
    assert wrong.stderr == f"pronk: {model}: no adapter in this folder; looked for adapter_config.json\n"


def test_all_weights(finetune: Run, run: Run, model: str, data: str, tmp_path: Path) -> None:
    options = "--full --max-steps 2 --samples 1 --json --lr 0.001".split()
    result = run("finetune", model, "--data", data, "--out", str(tmp_path / "out"), *options)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["trained_share"] == 1
    assert checkpoint.open(tmp_path / "out" / "model").tokenizer is not None


def test_stopped_and_resumed(finetune: Run, tmp_path: Path) -> None:
    """Ctrl-C and SIGTERM in the midst of a step; it ends as it would have."""
    for number, at, code in ((signal.SIGINT, 1, 130), (signal.SIGTERM, 3, 143)):
        with signalled(number, at):
            result = finetune(*(["--resume"] if at > 1 else []))
        assert (result.exit_code, result.stdout) == (code, "")
        told = f"stopped after step {at + 1} of 6, and saved; go on with the same command and --resume"
        assert result.stderr.splitlines()[-1] == told
    resumed = json.loads(finetune("--resume", "--json").stdout)
    (tmp_path / "out").rename(tmp_path / "first")
    whole = json.loads(finetune("--json").stdout)
    assert resumed["held_out_loss"] == whole["held_out_loss"]
    assert resumed["samples"] == whole["samples"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_out_of_time(finetune: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock on which a step takes 10 minutes. Each start counts anew, makes a step at least, and exits with 0."""
    from pronk.train.runs import run as runs

    ticks = count(0.0, 600.0)
    monkeypatch.setattr(runs, "monotonic", lambda: next(ticks))
    for limit, more, steps in (("0.25h", [], 2), ("1s", ["--resume"], 3), ("20m", ["--resume"], 5)):
        result = finetune("--max-time", limit, "--json", *more)
        assert result.exit_code == 0, result.stderr
        report = json.loads(result.stdout)
        assert (report["steps"], report["finished"], report["samples"]) == (steps, False, [])
        told = f"stopped after step {steps} of 6, for --max-time is over, and saved; "
        assert result.stderr.splitlines()[-1] == told + "go on with the same command and --resume"
    last = json.loads(finetune("--max-time", "1d", "--resume", "--json").stdout)
    (tmp_path / "out").rename(tmp_path / "first")
    whole = json.loads(finetune("--json").stdout)
    assert (last["finished"], last["held_out_loss"]) == (True, whole["held_out_loss"])


@pytest.mark.parametrize("limit", ["0", "0s", "-5", "5x", "1m1h", "", "nan", "inf", "1e9h", "9" * 400 + "h", "1h 30"])
def test_no_duration(finetune: Run, limit: str) -> None:
    result = finetune("--max-time", limit)
    assert result.exit_code == 2
    first, _ = result.stderr.splitlines()
    assert first.startswith("pronk: invalid value for '--max-time': ")


def test_a_signal_goes_before_the_clock(finetune: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever ends a run is told that it ended it."""
    from pronk.train.runs import run as runs

    ticks = count(0.0, 600.0)
    monkeypatch.setattr(runs, "monotonic", lambda: next(ticks))
    with signalled(signal.SIGTERM, 1):  # in the very step after which time is over
        result = finetune("--max-time", "15m")
    assert (result.exit_code, "--max-time is over" in result.stderr) == (143, False)


def test_prolonged_and_begun_from_an_adapter(finetune: Run, run: Run, model: str, data: str, tmp_path: Path) -> None:
    assert finetune().exit_code == 0
    longer = finetune("--resume", "--max-steps", "8", "--json")
    assert (longer.exit_code, json.loads(longer.stdout)["steps"]) == (0, 8)
    told = "prolonged from 6 to 8 steps; from step 6 on the learning rate is the longer run's"
    assert longer.stderr.splitlines()[0] == told
    shorter = finetune("--resume", "--max-steps", "7")
    assert (shorter.exit_code, "it can be prolonged, not cut short" in shorter.stderr) == (1, True)
    more = ["--data", data, "--from-adapter", str(tmp_path / "out"), "--max-steps", "1", "--samples", "0"]
    begun = run("finetune", model, *more, "--out", str(tmp_path / "next"))
    assert begun.exit_code == 0, begun.stderr
    assert adapter.read_config(tmp_path / "next")[0].rank == 4
    wrong = run("finetune", model, *more, "--out", str(tmp_path / "third"), "--lora-rank", "4")
    assert (wrong.exit_code, "--from-adapter has a rank" in wrong.stderr) == (2, True)


def test_show_batch_trains_nothing(finetune: Run, run: Run, model: str, data: str, tmp_path: Path) -> None:
    result = run("finetune", model, "--data", data, "--show-batch", "--batch-size", "2")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [line for line in result.stdout.splitlines() if line]
    assert lines[0].startswith("micro-batch 1: 2 examples, ")
    assert len(lines) == 6
    for line in (lines[1], lines[2], lines[4], lines[5]):
        prompt, _, answer = line.partition("⟦")
        assert "plus" in prompt
        assert answer.endswith(".</s>⟧")
    everything = run("finetune", model, "--data", data, "--show-batch", "--train-on-prompt").stdout
    assert "plus" in everything.partition("⟦")[2]


def test_colours_on_a_terminal(model: str, tmp_path: Path) -> None:
    """Ours, and none that the data ask for."""
    pty = pytest.importorskip("pty")
    path = records(tmp_path, json.dumps({"prompt": "a\x1b[31m", "completion": "b\x1b[0m"}))
    command = [sys.executable, "-m", "pronk", "finetune", model, "--data", path, "--show-batch"]
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm"}
    with subprocess.Popen(command, stdout=theirs, env=environment):
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # Linux says so when the other end is closed
            while piece := os.read(ours, 4096):
                shown += piece
    os.close(ours)
    text = shown.decode()
    assert text.count("\x1b[32m") == 1
    assert text.index("a␛[31m") < text.index("\x1b[32m") < text.index("b␛[0m</s>")


def test_no_better_than_before(finetune: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said; and the adapter is there all the same, of the best look."""
    from pronk.train.loop import Evaluation

    losses = iter([1.0, 3.0, 2.0])
    monkeypatch.setattr("pronk.train.loop.Loop.evaluate", lambda *_: Evaluation(next(losses), {}))
    result = finetune("--json")
    assert result.exit_code == 0, result.stderr
    assert "held-out loss never fell below MODEL's own" in result.stderr
    assert json.loads(result.stdout)["held_out_loss"] == {"first": 1.0, "last": 2.0, "kept": 2.0, "kept_step": 6}
    assert (tmp_path / "out" / adapter.WEIGHTS).exists()
    assert "held-out loss 3.0000 (the best so far, but worse than at step 0)" in result.stderr
    assert (
        "Kept is what it was at step 6, which is worse than at step 0." in (tmp_path / "out" / "README.md").read_text()
    )


def test_a_resumed_run_knows_what_it_was_before_it_learned(
    finetune: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: what was worse than at step 0 was the best so far, and no more was said, where another process had looked
    at step 0."""
    from pronk.train.loop import Evaluation

    losses = iter([1.0, 3.0, 2.0])
    monkeypatch.setattr("pronk.train.loop.Loop.evaluate", lambda *_: Evaluation(next(losses), {}))
    assert finetune("--max-steps", "3").exit_code == 0
    result = finetune("--max-steps", "6", "--resume")
    assert "held-out loss 2.0000 (the best so far, but worse than at step 0)" in result.stderr


def test_a_finished_run_that_is_resumed_says_so(finetune: Run) -> None:
    """It printed its report again, as if it had trained."""
    assert "finished already" not in finetune().stderr
    assert "the run was finished already, with step 6: a larger --epochs or --max-steps" in finetune("--resume").stderr


def test_a_folder_that_is_called_like_an_option(
    run: Run, model: str, data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pronk: --full holds 'letter', it said."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter").write_text("mine")
    monkeypatch.chdir(tmp_path)
    result = run("finetune", model, "--data", data, "--out", "full", *QUICK)
    assert (result.exit_code, result.stderr.splitlines()) == (
        1, ["pronk: full/ holds 'letter', which is no run's; choose an empty folder, or a new one"]
    )  # fmt: skip


def test_killed_and_resumed(finetune: Run, model: str, data: str, tmp_path: Path) -> None:
    """kill -9, in a process of its own, once some steps are done: its losses go on as if it had not been."""
    more = ["--max-steps", "40", "--save-every", "4", "--lora-dropout", "0.1", "--samples", "0"]
    metrics = tmp_path / "out" / "metrics.jsonl"
    given = ["--data", data, "--out", str(tmp_path / "out"), *QUICK, *more]
    slow = (  # from the ninth step on, that it is not at its end before it is killed
        "import time\nfrom pronk.train.loop import Loop\nstep = Loop.step\n"
        "def late(loop):\n    time.sleep(2 * (loop.position.step > 8))\n    return step(loop)\n"
        "Loop.step = late\nfrom pronk.cli import main\nmain()\n"
    )
    with subprocess.Popen([sys.executable, "-c", slow, "finetune", model, *given], stderr=subprocess.PIPE) as process:
        while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") > 8):
            time.sleep(0.005)
        process.kill()
    assert finetune(*more).exit_code == 1  # not without --resume
    resumed = finetune(*more, "--resume")
    assert resumed.exit_code == 0, resumed.stderr
    found = losses(metrics)
    (tmp_path / "out").rename(tmp_path / "killed")
    assert finetune(*more).exit_code == 0
    assert len(found) == 40 + 15
    assert losses(metrics) == found


def losses(metrics: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [(line["step"], line.get("loss", line.get("held_out_loss"))) for line in lines]


def records(tmp_path: Path, *lines: str) -> str:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    return str(path)


GOOD = '{"prompt": "a", "completion": "b"}'


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "is empty"),
        ([GOOD, '{"prompt": "a", "completion": " "}'], "line 2: has no answer: completion is empty"),
        ([GOOD, '{"prompt": "' + "long " * 60 + '", "completion": "b"}'], "line 2: takes 302 tokens, and"),
        (['{"prompt": "a", "chosen": "b", "rejected": "c"}'], "chosen+rejected is what pronk dpo, kto and reward"),
        (["{"], "line 1: is not JSON"),
    ],
)  # fmt: skip
def test_bad_data(finetune: Run, tmp_path: Path, lines: list[str], message: str) -> None:
    result = finetune(data=records(tmp_path, *lines))
    assert (result.exit_code, result.stdout) == (1, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_what_is_left_out_is_counted(finetune: Run, tmp_path: Path) -> None:
    long = '{"prompt": "a", "completion": "' + "long " * 60 + '", "source": "web"}'
    path = records(tmp_path, GOOD, long, '{"prompt": "a", "completion": ""}')
    result = finetune("--skip-bad-records", "--too-long", "cut", "--max-steps", "1", data=path)
    assert result.exit_code == 0, result.stderr
    assert result.stderr.splitlines()[:4] == [
        f"malformed records left out: 1; the first: {path}: line 3: has no answer: completion is empty",
        "examples cut at their end: 1",
        "keys that nobody reads, and of how many records: source (1)",
        "no data is held out, so that overfitting will not show",
    ]


def test_show_batch_says_what_was_cut_and_skipped_as_the_run_does(finetune: Run, tmp_path: Path) -> None:
    raw = ['{"prompt": "a", "completion": ""}', '{"prompt": "a", "completion": "' + "long " * 60 + '"}', GOOD, GOOD]
    path = records(tmp_path, *raw)
    options = ["--skip-bad-records", "--too-long", "skip", "--max-steps", "1"]
    shown, trained = (finetune(*options, *more, data=path).stderr.splitlines() for more in (["--show-batch"], []))
    assert shown == trained[: len(shown)]
    assert [line.split(":")[0] for line in shown[:3]] == [
        "malformed records left out", "examples left out as too long", "examples that are exact copies of another",
    ]  # fmt: skip


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "1001"])
def test_a_weight_out_of_range_is_wrong_usage(finetune: Run, data: str, weight: str) -> None:
    """It ended with 1, as a file that is not there does."""
    wrong = finetune("--show-batch", data=f"{data}={weight}")
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith(f"pronk: --data {data}={weight}: the weight must be over 0 and at most 1000")


def test_fields_give_keys_their_names(finetune: Run, tmp_path: Path) -> None:
    path = records(tmp_path, '{"query": "2+2=", "reply": "4", "id": 7}')
    refused = finetune("--show-batch", data=path)
    assert (refused.exit_code, "--fields" in refused.stderr) == (1, True)
    result = finetune("--fields", "query=prompt, reply=completion,id=", "--show-batch", data=path)
    assert "2+2=⟦4</s>⟧" in result.stdout
    assert "id" not in result.stderr
    wrong = finetune("--fields", "query=asked", data=path)
    said = "pronk: --fields must be KEY=NAME, the name one of answer, chosen, "  # and once "fields", which nobody typed
    assert (wrong.exit_code, wrong.stderr[: len(said)]) == (2, said)
    mistyped = finetune("--fields", "query=prompt,reply=completion,idd=", data=path)
    assert "no record has the key 'idd', which --fields renames" in mistyped.stderr


def test_a_step_that_reads_more_than_there_is_is_said(finetune: Run, tmp_path: Path) -> None:
    """Else a huge --accumulate would go round and round the data without a sign."""
    result = finetune("--accumulate", "5", "--batch-size", "1", "--max-steps", "1", data=records(tmp_path, GOOD, GOOD))
    assert result.stderr.splitlines()[2].startswith("each step reads all the data 2.5 times: ")
    assert "each step reads" not in finetune("--accumulate", "18", "--max-steps", "1", "--show-batch").stderr
    too_many = finetune("--accumulate", str((1 << 20) + 1))
    assert (too_many.exit_code, too_many.stderr.splitlines()[0]) == (
        2,
        "pronk: a step is of 1048576 micro-batches at most, not 1048577",
    )


def test_folders_that_cannot_be(finetune: Run, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    assert "--out is a folder, and " in finetune().stderr  # it said "cannot be written: File exists"
    (tmp_path / "out").unlink()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "letter").write_text("mine")
    assert "holds 'letter', which is no run's" in finetune().stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["letter"]  # and no lock in somebody's folder
    (tmp_path / "out" / "letter").unlink()
    assert "no checkpoint to resume from" in finetune("--resume").stderr
    assert finetune("--max-steps", "1").exit_code == 0
    again = finetune("--max-steps", "1")
    assert (again.exit_code, again.stderr.count("\n")) == (1, 1)
    assert "holds a run already; go on with it (--resume)" in again.stderr
    other = finetune("--max-steps", "1", "--accumulate", "4", "--resume")
    assert other.exit_code == 1
    assert "was made with --accumulate 2, and now it is 4" in other.stderr
    other = finetune("--max-steps", "1", "--train-on-prompt", "--resume")
    assert "was made without --train-on-prompt; resume with the same" in other.stderr  # not objective.train_on_prompt
    other = finetune("--max-steps", "1", "--lora-rank", "8", "--resume")  # it said lora.rank=4
    assert "was made with --lora-rank 4, and now it is 8; resume with the same" in other.stderr


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(finetune: Run, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir(mode=0o500)
    assert "cannot be written: Permission denied" in finetune().stderr


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--full"], "--full trains all weights; leave the options of LoRA out"),
        (["--target-modules", "q_proj,nothing"], "no target module 'nothing'"),
        (["--gradient-checkpointing", "--recompute", "3"], "is --recompute 1; give one of them"),
        (["--lora-dropout", "1"], "1.0 is not in the range"),
        (["--eval-share", "1"], "1.0 is not in the range"),
        (["--schedule", "wavy"], "'wavy' is not one of"),
    ],
)
def test_wrong_usage(finetune: Run, tmp_path: Path, more: list[str], message: str) -> None:
    result = finetune(*more)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--clip", "--lr", "--epochs", "--weight-decay", "--lora-alpha", "--warmup",
                                    "--eval-share", "--lora-dropout"])  # fmt: skip
@pytest.mark.parametrize("number", ["nan", "inf", "-nan"])
def test_numbers_that_are_none(finetune: Run, tmp_path: Path, option: str, number: str) -> None:
    result = finetune(f"{option}={number}")
    assert result.exit_code == 2
    assert option in result.stderr
    assert number.lstrip("-") in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", ["q4", "llm-int8"])
def test_beside_weights_in_codes(finetune: Run, tmp_path: Path, format: str) -> None:
    """What is trained is LoRA's, of all the weights there are, whatever these are kept in."""
    report = json.loads(finetune("--quantize", format, "--json", "--max-steps=2").stdout)
    assert 0.01 < report["trained_share"] < 0.2
    assert report["held_out_loss"]["last"] < report["held_out_loss"]["first"]
    resumed = finetune("--quantize", "f32", "--resume", "--max-steps=2")
    assert resumed.exit_code == 1
    assert f"--quantize {format}, and now it is 'f32'" in resumed.stderr


def test_a_log_that_fails_ends_no_run(finetune: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = ModuleType("wandb")
    wandb.init = lambda **_: 1 / 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    result = finetune("--report-to", "wandb", "--max-steps=2")
    assert result.exit_code == 0, result.stderr
    assert result.stderr.count("wandb failed, and the run goes on without it (ZeroDivisionError") == 1
    assert (tmp_path / "out" / adapter.WEIGHTS).exists()


def test_a_log_that_is_not_installed(finetune: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    result = finetune("--log-to", "wandb")
    assert result.exit_code == 1
    assert "--log-to wandb needs wandb; install it with: pip install wandb" in result.stderr
    assert not (tmp_path / "out").exists()


def test_no_folder_named(run: Run, model: str, data: str) -> None:
    result = run("finetune", model, "--data", data)
    assert result.exit_code == 2
    assert "name a folder for what comes out" in result.stderr


@pytest.mark.parametrize("said", ["DefaultCPUAllocator: can't allocate memory: you tried", "CUDA out of memory. Tried"])
def test_memory_that_does_not_suffice(finetune: Run, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    def step(*_: Any) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr("pronk.train.loop.Loop.step", step)
    result = finetune()
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("pronk: out of memory; what takes less: --recompute 1")


def test_without_torch(model: str, data: str, tmp_path: Path) -> None:
    """One line, and nothing made."""
    code = "import sys; sys.modules['torch'] = None; from pronk.cli import main; sys.argv[0] = 'pronk'; main()"
    command = [sys.executable, "-c", code, "finetune", model, "--data", data, "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("pronk: the torch engine needs torch")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
