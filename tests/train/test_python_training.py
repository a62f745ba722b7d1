"""Training from Python: pronk.finetune and its like take what their verbs take, yield metrics, return a result."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from prose import PROSE
from tiny_folder import save_tiny_chat_model
from training_runs import signalled, timeless, write_sums

import pronk
from pronk.cli import group
from pronk.cli.training_options import VIEWS
from pronk.errors import BadRequest, ModelNotFound, PronkError
from pronk.train.data.batches import Batches
from pronk.train.folder import CHECKPOINTS, METRICS
from pronk.train.runs import names, options
from pronk.train.runs.result import Result

VERBS = ("finetune", "dpo", "reward", "grpo", "pretrain")
QUICK: dict[str, Any] = {
    "lora_rank": 4, "lr": 0.02, "max_steps": 6, "accumulate": 2, "batch_size": 2, "eval_every": 3, "samples": 1,
    "device": "cpu", "threads": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=256)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sums(tmp_path_factory.mktemp("data") / "sums.jsonl", lambda a, b: {"completion": f" {a + b}."})


def command(verb: str) -> click.Command:
    found: click.Command = importlib.import_module(f"pronk.cli.{verb}").command
    return found


# -- What they take --


@pytest.mark.parametrize("verb", VERBS)
def test_they_take_what_the_verbs_take(verb: str) -> None:
    """Under the same names, with the same defaults; what a verb only shows is no option in Python."""
    taken = inspect.signature(getattr(pronk, verb)).parameters
    there = {p.name: p for p in command(verb).params if p.name not in VIEWS and p.expose_value}
    assert {*taken} == {*there}
    for name, parameter in taken.items():
        said = there[name].get_default(click.Context(command(verb)))
        usual = said if isinstance(said, int | float | str) else None  # where click says that none is set
        if parameter.default is inspect.Parameter.empty or name in ("fields", "log_to"):
            continue
        assert (parameter.default or None) == (usual or None), name
        assert there[name].required is False
    assert {*taken} <= {*options.RULES}


def test_names_that_the_command_line_also_knows_are_told_ours() -> None:
    others = {
        name.lstrip("-").replace("-", "_"): parameter.name
        for verb in VERBS
        for parameter in command(verb).params
        for name in parameter.opts
        if name.startswith("--")
    }
    aliases = {name: ours for name, ours in others.items() if name != ours and ours not in VIEWS}
    assert names.SAME.items() >= aliases.items()
    with pytest.raises(BadRequest, match=r"finetune\(\) has no learning_rate=; lr= is its name here"):
        pronk.finetune("m", "d", learning_rate=1e-4)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="lr_rate"):
        pronk.finetune("m", "d", lr_rate=1e-4)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: pronk.finetune("m", "d", max_stps=3), r"finetune\(\) got .* 'max_stps'; did you mean max_steps=\?"),
        (lambda: pronk.grpo("m", "d", rewards="exact"), r"'rewards'; did you mean reward=\?"),
        (lambda: pronk.pretrain("t", layer=2), r"'layer'; did you mean layers=\?"),
        (lambda: pronk.finetune("m", "d", frobnicate=1), "'frobnicate'$"),
    ],
)
def test_a_keyword_of_nobody_s_is_told_the_nearest(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        call()


WRONG: list[tuple[str, object]] = [
    ("model", ""), ("data", []), ("data", [{"prompt": "a"}]), ("out", 3), ("epochs", "three"), ("epochs", 0),
    ("epochs", float("nan")), ("max_steps", 0), ("max_steps", 2.0), ("batch_size", None), ("accumulate", True),
    ("pack", -1), ("bucket", 1), ("lr", -1e-4), ("warmup", 2), ("schedule", "cosin"), ("weight_decay", -1),
    ("clip", float("inf")), ("optimizer", "adam"), ("seed", -1), ("precision", "fp16"), ("recompute", 0.5),
    ("gradient_checkpointing", "yes"), ("threads", 0), ("device", ""), ("eval_data", ""), ("eval_share", 1),
    ("eval_every", 0), ("patience", 0), ("samples", -1), ("save_every", 0), ("resume", 1), ("log_to", "mlflow"),
    ("log_to", 3), ("max_length", 0), ("too_long", "drop"), ("skip_bad_records", None), ("fields", "a=b"),
    ("fields", {"a": 1}), ("chat_template", ""), ("tokenizer", 1), ("train_on_prompt", "no"), ("instructions", "none"),
    ("full", 0), ("lora_rank", 0), ("lora_alpha", 0), ("lora_dropout", 1), ("target_modules", []),
    ("from_adapter", ""), ("quantize", "nf4"), ("max_time", "soon"), ("max_time", 0), ("max_time", True),
    ("samples_at", "steps"), ("token_cache", 1), ("early_stop_task", ""),
    ("early_stop_limit", 0), ("push_to_hub", 1), ("private", "yes"),
    ("rslora", 1), ("dora", "yes"), ("lora_plus_ratio", 0), ("neftune_alpha", -1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_value_is_refused_by_its_python_name(model: Path, data: Path, name: str, value: object) -> None:
    given: dict[str, Any] = {"model": model, "data": data} | {name: value}
    with pytest.raises(BadRequest, match=f"^{name} must be "):
        pronk.finetune(**given)


def test_each_option_has_a_wrong_value_in_the_test_before() -> None:
    assert {name for name, _ in WRONG} == {*inspect.signature(pronk.finetune).parameters}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: pronk.finetune("m", "d", full=True, lora_rank=8),
            "full trains all weights; leave the options of LoRA",
        ),
        (lambda: pronk.finetune("m", "d", from_adapter="a", lora_rank=8), "from_adapter has a rank, an alpha, a kind"),
        (
            lambda: pronk.finetune("m", "d", gradient_checkpointing=True, recompute=2),
            "gradient_checkpointing is recomp",
        ),
        (lambda: pronk.finetune("m", "d", target_modules="lm_head"), "LoRA has no target module 'lm_head'"),
        (lambda: pronk.finetune("m", "d", fields={"query": "asked"}), "fields must be KEY=NAME"),
        (lambda: pronk.finetune("m", "d", full=True, quantize="q4"), "q4 is for weights that are frozen"),
        (lambda: pronk.dpo("m", "d", beta=0.0), "beta must be a number over 0, not 0.0"),
        (
            lambda: pronk.grpo("m", "d", reward="exact", num_generations=1),
            "num_generations must be a whole number from 2",
        ),
        (lambda: pronk.grpo("m", "d", reward=[]), "reward must be a reward"),
        (lambda: pronk.grpo("m", "d", reward="length:x"), "a whole number of tokens from 1 on, not 'x'"),
        (lambda: pronk.grpo("m", "d", reward="regex:("), "is no regular expression"),
        (lambda: pronk.grpo("m", "d", reward="lenght:20"), "there is no reward 'lenght'; did you mean length:20?"),
        (lambda: pronk.grpo("m", "d", reward="schema"), "the reward schema is schema:FILE"),
        (lambda: pronk.grpo("m", "d", reward=lambda *_: 0.0), "put the function into a file, at its top level"),
        (lambda: pronk.grpo("m", "d", reward="exact", reward_weights=(1, 2)), "1 reward has 2 reward_weights"),
        (lambda: pronk.grpo("m", "d", reward="exact", kl_coef=0.1, full=True), "without its adapter: train LoRA"),
        (lambda: pronk.grpo("m", "d", reward="exact", lora_dropout=0.1), "lora_dropout would make what is trained an"),
        (lambda: pronk.grpo("m", "d", reward="exact", too_long="cut"), "would ask half a question"),
        (lambda: pronk.grpo("m", "d", reward="exact", loss_type="hinge"), "loss_type must be one of grpo, dr_grpo, d"),  # type: ignore[arg-type]
        (lambda: pronk.grpo("m", "d", reward="exact", rollout="exact", dynamic_sampling=True), "leave it out"),
        (lambda: pronk.reward("m", "d", center_rewards=-1), "center_rewards must be a number from 0 on, not -1"),
        (
            lambda: pronk.dpo("m", "d", label_smoothing=0.1, loss_type="hinge"),
            "label_smoothing is for the sigmoid loss",
        ),
        (lambda: pronk.pretrain("t", vocab_size=300, tokenizer="llama2"), "leave vocab_size out"),
        (lambda: pronk.finetune("m", "d", __file__), "out is a folder, and .*py is a file; name another"),
        (lambda: pronk.grpo("m", "d", reward="accuracy"), "there is no reward 'accuracy'; there are exact, regex"),
        (lambda: pronk.pretrain("t", hidden=100, heads=3), "a hidden size of 100 is no multiple of 3 heads"),
    ],
)
def test_options_that_contradict_each_other(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        call()


# -- What they yield and return --


def test_they_yield_metrics_and_return_a_result_as_the_verb_does(model: Path, data: Path, tmp_path: Path) -> None:
    run = pronk.finetune(model, data, tmp_path / "python", **QUICK)
    assert not (tmp_path / "python").exists()  # it begins when it is iterated over
    with pytest.raises(BadRequest, match="no result: it made no step"):
        _ = run.result
    lines = list(run)
    written = [json.loads(line) for line in (tmp_path / "python" / METRICS).read_text().splitlines()]
    assert lines == written
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "held_out_loss" in line] == [0, 3, 6]
    result = run.result
    assert isinstance(result, Result)
    assert (result.finished, result.steps, result.examples) == (True, 6, {"train": 18, "held_out": 2})
    assert (result.out, result.adapter, result.model_folder) == (str(tmp_path / "python"),) * 2 + (None,)
    assert result.held_out_loss
    assert result.held_out_loss["kept"] == min(line["held_out_loss"] for line in lines[1:] if "held_out_loss" in line)
    (sample,) = result.samples
    llm = pronk.load(model, adapter=result.adapter)
    said = llm.generate(sample["prompt"], max_new_tokens=64)
    assert not isinstance(said, list)
    assert said.text.strip() == sample["after"]

    given = {name: value for name, value in QUICK.items() if name != "data"}
    arguments = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    out = str(tmp_path / "verb")
    verb = CliRunner().invoke(group, ["finetune", str(model), "--data", str(data), "--out", out, *arguments, "--json"])
    assert verb.exit_code == 0, verb.stderr
    report, ours = json.loads(verb.stdout), result.to_dict()
    clock = {"out", "adapter", "seconds", "tokens_a_second", "peak_bytes", "curve"}
    assert {name: value for name, value in report.items() if name not in clock} == {
        name: value for name, value in ours.items() if name not in clock
    }
    assert report.keys() == ours.keys()
    assert timeless(tmp_path / "verb") == timeless(tmp_path / "python")
    weights = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("verb", "python")]
    assert weights[0] == weights[1]


def test_run_trains_to_the_end_and_a_run_is_had_once(model: Path, data: Path, tmp_path: Path) -> None:
    run = pronk.finetune(model, [data, f"{data}=2"], tmp_path / "out", **QUICK | {"full": True, "lora_rank": None})
    assert run.run().model_folder == str(tmp_path / "out" / "model")
    assert run.finished
    with pytest.raises(BadRequest, match="has begun already"):
        run.run()
    with pytest.raises(BadRequest, match="holds a run already"):
        pronk.finetune(model, data, tmp_path / "out", **QUICK).run()
    with pytest.raises(BadRequest, match="name a folder for what comes out: out"):
        pronk.finetune(model, data, **QUICK).run()


def test_leaving_the_loop_stops_the_run_as_ctrl_c_does_and_resume_goes_on(
    model: Path, data: Path, tmp_path: Path
) -> None:
    pronk.finetune(model, data, tmp_path / "whole", **QUICK).run()
    run = pronk.finetune(model, data, tmp_path / "parts", **QUICK)
    for line in run:
        if line["step"] == 3:  # after which a look at held-out data was due: it is not lost
            break
    assert not run.finished
    assert (run.result.finished, run.result.steps, run.result.samples) == (False, 3, ())
    held = {path.name for path in (tmp_path / "parts" / CHECKPOINTS).iterdir()}
    assert held == {"step-000000", "step-000003"}
    again = pronk.finetune(model, data, tmp_path / "parts", **QUICK, resume=True)
    for line in again:
        if line["step"] == 5:
            again.stop()
    assert not again.finished
    result = pronk.finetune(model, data, tmp_path / "parts", **QUICK, resume=True).run()
    assert result.finished
    assert timeless(tmp_path / "parts") == timeless(tmp_path / "whole")


def test_before_a_best_is_there_the_result_names_the_checkpoint_s_adapter(
    model: Path, data: Path, tmp_path: Path
) -> None:
    run = pronk.finetune(model, data, tmp_path / "out", **QUICK)
    next(line for line in run if line["step"] == 1)
    found = run.result.adapter
    assert found == str(tmp_path / "out" / CHECKPOINTS / "step-000001")
    assert pronk.load(model, adapter=found).generate("1 plus 1 is", max_new_tokens=2)


def test_an_error_in_the_loop_leaves_the_run_saved(model: Path, data: Path, tmp_path: Path) -> None:
    def loop() -> None:
        for line in pronk.finetune(model, data, tmp_path / "out", **QUICK):
            if line["step"] == 2:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert (tmp_path / "out" / CHECKPOINTS / "step-000002").exists()


def test_a_program_that_ends_amid_a_run_leaves_it_saved(model: Path, data: Path, tmp_path: Path) -> None:
    """What still held the lines when the interpreter ended could save nothing, and printed a traceback of a page."""
    script = (
        "import sys, pronk\n"
        f"lines = iter(pronk.finetune(*sys.argv[1:], **{QUICK}))\n"
        "print(next(line for line in lines if line['step'] == 2)['step'])"
    )
    argv = [sys.executable, "-c", script, str(model), str(data), str(tmp_path / "out")]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert (done.stdout, "Exception" in done.stderr) == ("2\n", False)
    assert (tmp_path / "out" / CHECKPOINTS / "step-000002").exists()


def test_ctrl_c_in_the_midst_of_a_step_finishes_and_saves_it(model: Path, data: Path, tmp_path: Path) -> None:
    pronk.finetune(model, data, tmp_path / "whole", **QUICK).run()
    with signalled(signal.SIGINT, 1), pytest.raises(KeyboardInterrupt):
        pronk.finetune(model, data, tmp_path / "parts", **QUICK).run()
    assert (tmp_path / "parts" / CHECKPOINTS / "step-000002").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    pronk.finetune(model, data, tmp_path / "parts", **QUICK, resume=True).run()
    assert timeless(tmp_path / "parts") == timeless(tmp_path / "whole")


def test_a_second_ctrl_c_does_not_wait(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = Batches.passes

    def interrupted(*given: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return passes(*given)

    monkeypatch.setattr(Batches, "passes", interrupted)
    with signalled(signal.SIGINT, 1), pytest.raises(KeyboardInterrupt):
        pronk.finetune(model, data, tmp_path / "out", **QUICK).run()
    assert not (tmp_path / "out" / CHECKPOINTS / "step-000002").exists()


def test_a_run_in_another_thread(model: Path, data: Path, tmp_path: Path) -> None:
    """Where no signal can be handled."""
    found: list[Result] = []
    work = pronk.finetune(model, data, tmp_path / "out", **QUICK)
    thread = threading.Thread(target=lambda: found.append(work.run()))
    thread.start()
    thread.join()
    assert found[0].steps == 6


def test_data_and_plan_need_no_folder(model: Path, data: Path) -> None:
    run = pronk.finetune(model, str(data), **QUICK)
    assert len(run.data.train) == 18
    assert run.plan().trained == sum(tensor.numel() for tensor in _lora_tensors(model))
    with pytest.raises(ModelNotFound, match=r"nowhere\.jsonl"):
        _ = pronk.finetune(model, "nowhere.jsonl", **QUICK).data


def _lora_tensors(model: Path) -> list[torch.Tensor]:
    from pronk.checkpoint.adapter import LoraConfig
    from pronk.train import lora

    module = pronk.load(model).to_torch()
    lora.add(module, LoraConfig(rank=4))
    return [p for p in module.parameters() if p.requires_grad]


def test_what_is_left_out_is_logged(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a", "completion": ""}\n')
    with caplog.at_level("INFO", "pronk.train"):
        pronk.finetune(model, path, tmp_path / "out", skip_bad_records=True, max_steps=1, device="cpu").run()
    assert "malformed records left out: 1" in caplog.text


def test_fields_as_a_mapping(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"query": "2+2=", "reply": "4", "id": 7}')
    run = pronk.finetune(model, path, fields={"query": "prompt", "reply": "completion", "id": ""})
    assert len(run.data.train) == 1
    assert run.data.unused == {}


def test_dpo_from_python(model: Path, tmp_path: Path) -> None:
    answers = lambda a, b: {"chosen": f" {a + b}.", "rejected": " a number"}  # noqa: E731
    path = write_sums(tmp_path / "pairs.jsonl", answers)
    run = pronk.dpo(model, path, tmp_path / "out", beta=0.2, **QUICK)
    lines = list(run)
    assert all("rewards/margins" in line for line in lines if "loss" in line)
    assert run.result.rewards
    assert run.result.held_out_rewards
    assert run.settings.objective.name == "dpo"
    assert run.result.to_dict()["rewards"] == run.result.rewards


def test_pretrain_from_python(tmp_path: Path) -> None:
    run = pronk.pretrain(
        PROSE, tmp_path / "out", vocab_size=360, hidden=32, layers=2, kv_heads=2, ctx_size=48, max_steps=4,
        eval_every=2, lr=0.01, samples=1, device="cpu", threads=1,
    )  # fmt: skip
    lines = list(run)
    assert [line["step"] for line in lines if "held_out_loss" in line] == [0, 2, 4]
    result = run.result
    assert (result.vocabulary, result.adapter) == (360, None)
    assert result.bits_a_byte
    assert result.model_folder
    llm = pronk.load(result.model_folder)
    assert sum(tensor.read().size for tensor in llm.checkpoint.tensors.values()) == result.parameters
    ids = torch.tensor([llm.tokenizer.encode("The ferry")])
    assert llm.to_torch()(ids).shape == (1, ids.shape[1], 360)
    assert result.samples[0]["goes on"]


# -- What they cost before they are called --


def test_importing_pronk_imports_neither_torch_nor_training() -> None:
    script = (
        "import sys, pronk; pronk.finetune, pronk.dpo, pronk.reward, pronk.pretrain\n"
        "print(*{'torch', 'numpy'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("", "numpy")
    script = "import sys, pronk; print(*(name for name in sys.modules if name.startswith('pronk.train')))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_without_torch_one_line_says_so() -> None:
    script = (
        "import sys; sys.modules['torch'] = None\nimport pronk\n"
        "try: pronk.finetune('m', 'd')\nexcept pronk.errors.PronkError as error: print(error)"
    )
    script = script.replace("import pronk\n", "import pronk, pronk.errors\n")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("the torch engine needs torch")
    assert issubclass(BadRequest, PronkError)
