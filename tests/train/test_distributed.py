"""Two processes train as one does, and what goes wrong with one of them ends both with a line.

Two processes are started once, and do all that is compared; what they are compared with is done here.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from formats import save_huggingface
from tiny import random_weights, tiny_config
from tiny_folder import save_tiny_chat_model
from two_processes import perform

from pronk import checkpoint
from pronk.checkpoint.containers import safetensors
from pronk.train.distributed import Group

pytestmark = pytest.mark.timeout(900)  # two processes that wait for each other are slow on a busy machine

LORA = {"rank": 4, "alpha": 8}
SAME = 1e-5  # sums are taken in another order, and no more

# Completions of other lengths than their neighbours', for one in five tokens ends them.
GROUPS = {"reward": ("regex:[a-m]", "length:6"), "reward_weights": (1.0, 0.5), "num_generations": 4,
          "max_new_tokens": 6, "num_iterations": 2, "reward_timeout": 600.0}  # fmt: skip

# What is trained by one process and by two: changes to the settings below.
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "tied": {"model": "tied", "optimizer": "sgd", "recompute": 2, "accumulate": 4, "clip": 0.5},
    "lora": {"lora": LORA, "recompute": 1, "accumulate": 4},
    "dora": {"lora": {**LORA, "dora": True}, "model": "tied", "lora_plus_ratio": 4.0},
    "codes": {"lora": {**LORA, "dora": True}, "quantize": "q8"},
    "dpo": {"lora": LORA, "objective": {}, "data": "pairs.jsonl"},
    "dpo-full": {"objective": {}, "data": "pairs.jsonl"},
    "orpo": {"lora": LORA, "objective": {"loss_type": "orpo"}, "data": "pairs.jsonl"},
    "kto": {"lora": LORA, "objective": {"beta": 0.5}, "data": "judged.jsonl"},
    "kto-full": {"objective": {"beta": 0.5}, "data": "judged.jsonl"},
    "reward": {"lora": LORA, "objective": {}, "data": "margins.jsonl"},
    "reward-full": {"objective": {}, "data": "margins.jsonl", "model": "tied"},
    "grpo": {"lora": LORA, "objective": {**GROUPS, "kl_coef": 0.1, "dynamic_sampling": True}, "data": "prompts.jsonl"},
    "grpo-full": {
        "objective": {**GROUPS, "scale_rewards": "batch", "loss_type": "dapo"},
        "data": "prompts.jsonl",
        "lr": 1e-3,
    },
    "grpo-exact": {"lora": LORA, "objective": {**GROUPS, "rollout": "exact"}, "data": "prompts.jsonl", "max_steps": 2},
    "bf16": {"precision": "bf16"},
    "f16": {"precision": "f16", "lora": LORA},
}
DROPOUT = {"lora": {**LORA, "dropout": 0.3}}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, data, and folders `one` and `two` for runs."""
    root = tmp_path_factory.mktemp("processes")
    save_tiny_chat_model(root / "plain")
    shutil.copytree(root / "plain", root / "tied")
    # Odd sizes: shares of 2 processes are of different sizes, and one row goes to one of them alone.
    odd = {"hidden_size": 56, "intermediate_size": 33, "head_dim": 6, "num_key_value_heads": 1}
    with_biases = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    tied = tiny_config(vocab_size=259, max_position_embeddings=256, **odd, **with_biases)
    save_huggingface(root / "tied", tied, random_weights(tied))
    sums = [(a, b) for a in range(4) for b in range(5)]
    of_sums = [{"prompt": f"{a} plus {b} is", "completion": f" {a + b}."} for a, b in sums]
    pairs = [{"prompt": f"{a} plus {b} is", "chosen": f" {a + b}.", "rejected": " I won't say."} for a, b in sums]
    margins = [{**pair, "margin": 0.25 * number} for number, pair in enumerate(pairs)]
    judged = [{**one, "label": number % 3 != 1} for number, one in enumerate(of_sums)]
    prompts = [{"prompt": f"{a} plus {b} is" + " now" * (a == b)} for a, b in sums]
    files = {
        "prompts": prompts,
        "sums": of_sums,
        "pairs": pairs,
        "judged": judged,
        "margins": margins,
        "other": of_sums[1:] + of_sums[:1],
    }
    for name, records in files.items():
        (root / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (root / "one").mkdir()
    (root / "two").mkdir()
    return root


@pytest.fixture(scope="module")
def settings(root: Path) -> Callable[..., dict[str, Any]]:
    def of(**changes: Any) -> dict[str, Any]:
        """3 of 20 examples are held out: of two processes one has 2 of them to read, and the other 1."""
        base = {"model": "plain", "data": "sums.jsonl", "lora": None, "max_steps": 4, "batch_size": 2, "accumulate": 2,
                "lr": 1e-2, "save_every": 9, "eval_every": 2, "eval_share": 0.15}  # fmt: skip
        chosen = {**base, **changes}
        return {**chosen, "model": str(root / chosen["model"]), "data": str(root / chosen["data"])}

    return of


@pytest.fixture(scope="module")
def came(root: Path, settings: Callable[..., dict[str, Any]]) -> dict[str, list[Any]]:
    """What came of each run in each of two processes, by name; the runs of one process are there, too.

    And `threads`, the names of those that each process had at its end.
    """
    whole = {"settings": settings()}
    perform(root / "one", {"folder": "begun", **whole, "stop": 2}, Group())
    shutil.copytree(root / "one" / "begun", root / "two" / "from-one")
    for name, changes in KINDS.items():
        perform(root / "one", {"folder": name, "settings": settings(**changes)}, Group())
    dropout = {"settings": settings(**DROPOUT)}
    plan = [
        *({"folder": name, "settings": settings(**changes)} for name, changes in KINDS.items()),
        {"folder": "from-one", **whole, "resume": True},
        {"folder": "begun", **whole, "stop": 2},
        {"folder": "dropout", **dropout},
        {"folder": "dropout-parts", **dropout, "stop": 2},
        {"folder": "dropout-parts", **dropout, "resume": True},
        {"folder": "uneven", "settings": settings(accumulate=3)},
        *({"folder": kind, "settings": settings(optimizer=kind)} for kind in ("adamw8bit", "adafactor", "muon")),
        {"folder": "other-data", **whole, "data": str(root / "other.jsonl")},
    ]
    (root / "plan.json").write_text(json.dumps(plan))
    program = Path(__file__).with_name("two_processes.py")
    command = [sys.executable, "-W", "error", str(program), str(root / "two"), str(root / "plan.json")]
    for port in range(20_000 + os.getpid() % 10_000, 32_000):  # below those that systems give to whoever connects
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            break
    place = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    started = [
        subprocess.Popen(
            command,
            env={**place, "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [process.communicate(timeout=800) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], told
    lines = [[json.loads(line) for line in out.splitlines()] for out, _ in told]
    found: dict[str, list[Any]] = {}
    for number, work in enumerate(plan):
        found[work["folder"]] = [of_rank[number] for of_rank in lines]
    return {**found, "threads": [of_rank[-1] for of_rank in lines]}


def metrics(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def results(run: Path) -> dict[str, np.ndarray]:
    (file,) = (path for path in run.rglob("*.safetensors") if "checkpoints" not in path.parts)
    return {name: tensor.read() for name, tensor in safetensors.read(file).items()}


def assert_alike(one: Path, other: Path, within: float) -> None:
    for line, same in zip(metrics(one), metrics(other), strict=True):
        assert line == pytest.approx(same, abs=within, rel=within)
    found, expected = results(one), results(other)
    assert found.keys() == expected.keys()
    for name, array in found.items():
        np.testing.assert_allclose(array, expected[name], atol=within, err_msg=name)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "16" not in kind])
def test_two_processes_are_one(came: dict[str, Any], root: Path, kind: str) -> None:
    """Losses, lengths of gradients, held-out losses, and what comes out."""
    assert [one["came"] for one in came[kind]] == ["ended", "ended"]
    assert_alike(root / "two" / kind, root / "one" / kind, SAME)


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_sixteen_bits_differ_by_their_rounding(came: dict[str, Any], root: Path, kind: str) -> None:
    """Weights of norms are rounded, too, where blocks are gathered in 16 bits: a rounding more among some dozens.

    Each is of half a unit, 2^-9 or 2^-12 of a number; a loss near 6 moves by no more than that, nor by nothing.
    """
    assert [one["came"] for one in came[kind]] == ["ended", "ended"]
    unit = {"bf16": 2.0**-8, "f16": 2.0**-11}[kind]
    moved = [
        abs(line["loss"] - same["loss"]) / same["loss"]
        for line, same in zip(metrics(root / "two" / kind), metrics(root / "one" / kind), strict=True)
        if "loss" in line
    ]
    assert 0 < max(moved) < unit


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("grpo")])
def test_two_processes_write_what_one_does(came: dict[str, Any], root: Path, kind: str) -> None:
    """Each writes half, and the first keeps all of it; what writes is to the bit what is trained, where asked."""
    one, two = (
        [json.loads(line) for line in (root / of / kind / "rollouts.jsonl").read_text().splitlines()]
        for of in ("one", "two")
    )
    assert [line.pop("advantage") for line in one] == pytest.approx([line.pop("advantage") for line in two], abs=1e-9)
    assert one == two
    assert (root / "two" / kind / "rollouts.html").exists()
    steps = [line for line in metrics(root / "two" / kind) if "loss" in line]
    assert len({line["completion"] for line in two}) > 4
    assert max(abs(line["grad_norm"]) for line in steps) > 0
    if kind == "grpo-exact":
        assert all(line["mismatch/logps"] == 0 for line in steps)


def test_each_holds_its_share(came: dict[str, Any], root: Path) -> None:
    model = checkpoint.open(root / "plain")
    weights = sum(int(np.prod(tensor.shape)) for tensor in model.tensors.values())
    held = [one["held"] for one in came["full"]]
    assert sum(held) == weights
    assert max(held) < 0.51 * weights
    assert sum(one["held"] for one in came["codes"]) < 0.8 * weights  # codes are no parameters, and whole in each


def test_resumed_is_as_if_never_stopped(came: dict[str, Any], root: Path) -> None:
    """To the bit, dropout included; one process alone was told to stop, and both did after the same step."""
    assert [one["came"] for one in came["dropout-parts"]] == ["ended", "ended"]
    assert metrics(root / "two" / "dropout-parts") == metrics(root / "two" / "dropout")
    parts, whole = results(root / "two" / "dropout-parts"), results(root / "two" / "dropout")
    assert all(np.array_equal(parts[name], whole[name]) for name in whole)
    plain = [line["loss"] for line in metrics(root / "two" / "lora") if "loss" in line]
    assert [line["loss"] for line in metrics(root / "two" / "dropout") if "loss" in line] != plain  # it was at work


def test_another_number_of_processes_goes_on(
    came: dict[str, Any], root: Path, settings: Callable[..., dict[str, Any]]
) -> None:
    """One begins and two end, and the other way round."""
    assert [one["came"] for one in came["from-one"]] == ["ended", "ended"]
    assert_alike(root / "two" / "from-one", root / "one" / "full", SAME)
    assert [one["came"] for one in came["begun"]] == ["stopped", "stopped"]
    shutil.copytree(root / "two" / "begun", root / "one" / "from-two")
    assert (
        perform(root / "one", {"folder": "from-two", "settings": settings(), "resume": True}, Group())["came"]
        == "ended"
    )
    assert_alike(root / "one" / "from-two", root / "one" / "full", SAME)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("uneven", "2 processes share the micro-batches of a step evenly, and 3 are not a multiple of that"),
        ("adamw8bit", "adamw8bit's codes are not cut among processes; take adamw, or one process"),
        ("adafactor", "adafactor's means of rows and columns are not cut among processes; take adamw, or one process"),
        ("muon", "muon's matrices are not cut among processes; take adamw, or one process"),
        ("other-data", "the processes of this run have different settings or data"),
    ],
)
def test_refused_by_all(came: dict[str, Any], name: str, says: str) -> None:
    assert all(one["came"].startswith(says) for one in came[name])


def test_no_thread_of_the_group_outlives_the_interpreter(came: dict[str, Any]) -> None:
    """One of gloo's that did aborted a run that had ended well, once in some dozens (exit status -6)."""
    for left in came["threads"]:
        assert any(name.startswith("python") for name in left)
        assert not [name for name in left if "gloo" in name]


@pytest.mark.slow
def test_torchrun_with_a_process_that_is_killed(root: Path, tmp_path: Path) -> None:
    """The other one ends at once, with one line; the run goes on when it is told to, and stops when it is told to."""
    with _torchrun(root, tmp_path) as begun:
        _wait(begun, lambda: len(_lines(tmp_path / "run")) > 4)
        os.kill(_last_process(begun.pid), signal.SIGKILL)
        out, err = begun.communicate(timeout=600)
    assert (begun.returncode, out) == (1, "")
    assert [line for line in err.splitlines() if line.startswith("pronk:")] == [
        "pronk: another process of this run has ended, or did not answer; go on with the same command and --resume"
    ]
    assert err.count("step 0 of 100000: held-out loss") == 1  # the first process speaks alone
    with _torchrun(root, tmp_path, "--resume") as again:
        before = len(_lines(tmp_path / "run"))
        _wait(again, lambda: len(_lines(tmp_path / "run")) > before)
        again.terminate()
        out, err = again.communicate(timeout=600)
    assert out == ""
    (stopped,) = (line for line in err.splitlines() if line.startswith("stopped after step"))
    step = int(stopped.split()[3])
    assert (tmp_path / "run" / "checkpoints" / f"step-{step:06d}").exists()
    assert [line["step"] for line in metrics(tmp_path / "run") if "loss" in line] == list(range(1, step + 1))


@contextmanager
def _torchrun(root: Path, folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Two processes of `pronk finetune`, which would never end."""
    command = [
        # torchrun ends the others when one has ended: not before they could say so themselves.
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--monitor-interval", "3",
        "--nproc-per-node", "2", "-m", "pronk", "finetune", str(root / "plain"), "--data", str(root / "sums.jsonl"),
        "--out", "run", "--full", "--samples", "0", "--accumulate", "2", "--save-every", "2", "--device", "cpu",
        "--max-steps", "100000", *options,
    ]  # fmt: skip
    started = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield started
    finally:
        if started.poll() is None:
            started.terminate()
        started.communicate()


def _wait(process: subprocess.Popen[str], until: Callable[[], bool]) -> None:
    while not until():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def _lines(run: Path) -> list[str]:
    file = run / "metrics.jsonl"
    return file.read_text().splitlines() if file.exists() else []


def _last_process(launcher: int) -> int:
    """The process of rank 1 that torchrun started."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return next(int(pid) for pid in children if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
