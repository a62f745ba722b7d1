"""The verbs on a real, tiny model: what they print, what they write, and how they refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from formats import save_huggingface
from tiny import random_weights, tiny_config
from tiny_folder import save_tiny_chat_model

import pronk
import pronk.cli.progress
from pronk.errors import BadFile
from pronk.formats.quantize import quantize
from pronk.llm import LLM

Run = Callable[..., Result]
PRONK = [sys.executable, "-m", "pronk"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def llm(model: str) -> LLM:
    return pronk.load(model, device="cpu")


def test_a_process_prints_the_text_and_nothing_but_it(model: str, llm: LLM) -> None:
    expected = llm.generate("Hello", max_new_tokens=30).text
    command = [*PRONK, "generate", "-m", model, "-n", "30", "--device", "cpu", "Hello"]
    done = subprocess.run(command, capture_output=True, check=True)
    assert done.stdout.decode() == expected + "\n"
    statistics, stopped = done.stderr.decode().splitlines()
    assert statistics.startswith("5 prompt tokens")
    assert stopped == "stopped after 30 tokens; -n allows more"


def test_json_is_what_the_library_says(run: Run, model: str, llm: LLM) -> None:
    expected = llm.generate("Hello", max_new_tokens=8, temperature=1.0, seed=7, logprobs=2)
    command = "generate --device cpu -n 8 --temp 1 -s 7 --logprobs 2 --json Hello".split()
    found = json.loads(run(*command, "-m", model).stdout)
    assert (found["text"], found["tokens"], found["seed"]) == (expected.text, expected.tokens, 7)
    assert [entry["logprob"] for entry in found["logprobs"]] == [entry.logprob for entry in expected.logprobs]
    assert json.loads(run(*command, "-m", model, "--no-cache").stdout)["tokens"] == expected.tokens


def test_logprobs_in_json_have_the_texts_and_bytes_of_tokens(run: Run, model: str, llm: LLM) -> None:
    command = "generate --device cpu -n 30 --temp 3 -s 7 --logprobs 2 --ignore-eos --json Hello".split()
    found = json.loads(run(*command, "-m", model).stdout)
    entries = [part for entry in found["logprobs"] for part in (entry, *entry["top"])]
    assert len(entries) == 90
    for entry in entries:
        assert bytes(entry["bytes"]) == llm.tokenizer.token_bytes(entry["token"])
        assert bytes(entry["bytes"]).decode("utf-8", "backslashreplace") == entry["text"]
    assert b"".join(bytes(entry["bytes"]) for entry in found["logprobs"]).decode("utf-8", "replace") == found["text"]
    assert any(max(entry["bytes"], default=0) > 127 for entry in entries)  # half a character, which has no text


def test_more_samples_than_run_at_once_queue(run: Run, model: str, llm: LLM) -> None:
    command = "generate --device cpu -n 2 --temp 1 -s 7 --num-samples 1000 --json Hello".split()
    found = json.loads(run(*command, "-m", model).stdout)["sequences"]
    assert len(found) == 1000
    few = llm.generate("Hello", max_new_tokens=2, temperature=1.0, seed=7, num_samples=5)
    assert [one["tokens"] for one in found[:5]] == [one.tokens for one in few]


def test_samples_and_beams(run: Run, model: str, llm: LLM) -> None:
    common = ["generate", "--device", "cpu", "-m", model, "-n", "6", "--json", "Hello"]
    samples = llm.generate("Hello", max_new_tokens=6, temperature=1.0, seed=7, n=3)
    found = json.loads(run(*common, *"--temp 1 -s 7 --num-samples 3".split()).stdout)
    assert [s["text"] for s in found["sequences"]] == [s.text for s in samples]
    beams = llm.generate("Hello", max_new_tokens=6, num_beams=3, num_return_sequences=2)
    found = json.loads(run(*common, *"--num-beams 3 --num-return-sequences 2".split()).stdout)
    assert [(s["text"], s["score"]) for s in found["sequences"]] == [(s.text, s.score) for s in beams]
    assert found["text"] == beams[0].text


def test_chat_is_the_librarys_chat(run: Run, model: str, llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    first = llm.chat(messages, max_new_tokens=10).text
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "so?"}]
    second = llm.chat(messages, max_new_tokens=10).text
    result = run("chat", "--device", "cpu", "-m", model, "-n", "10", "--temp", "0", input="hi\nso?\n")
    assert result.stdout == f"{first}\n{second}\n"


def test_a_chat_that_outgrows_the_context(run: Run, model: str) -> None:
    result = run("chat", "--device", "cpu", "-m", model, "-n", "5", "-c", "64", input="x" * 80 + "\nhi\n")
    assert result.exit_code == 1
    assert "pronk: this question has 98 tokens and at most 63 fit; shorten it; --ctx-size" in result.stderr
    assert result.stdout.endswith("\n")


def test_a_chat_template_that_is_none(run: Run, model: str, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for %}")
    result = run("chat", "--device", "cpu", "-m", model, "--chat-template", str(template), input="hi\n")
    assert result.exit_code == 1
    assert result.stderr.startswith("pronk: ")
    assert result.stderr.count("\n") == 1


def test_inspect(run: Run, model: str) -> None:
    found = json.loads(run("inspect", model, "--json").stdout)
    config = tiny_config(vocab_size=259, max_position_embeddings=1024)
    assert found["format"] == "huggingface"
    assert found["config"] == json.loads(json.dumps(config.to_dict()))
    assert found["tokenizer"]["kind"] == "tokenizer.json"
    assert found["tokenizer"]["chat_template"] is True
    shapes = config.tensor_shapes()
    assert {t["name"]: tuple(t["shape"]) for t in found["tensors"]} == shapes
    assert all(t["type"] == "F32" and t["bytes"] == 4 * np.prod(t["shape"]) for t in found["tensors"])
    stored = 4 * sum(int(np.prod(shape)) for shape in shapes.values())
    largest = 4 * 259 * 64
    plan = {"engine": "torch", "type": "f32", "files": 1, "stored_bytes": stored}
    plan |= {"loaded_bytes": stored, "peak_bytes": stored + largest}
    assert found["plan"] == plan
    cpu = found["cpu_plan"]
    assert (cpu["type"], cpu["kv_type"]) == ("f32", "f32")
    assert cpu["weight_bytes"] >= 4 * sum(int(np.prod(shape)) for shape in shapes.values() if len(shape) == 2)
    # Values are stored for 64 dimensions at least; keys for as many as there are.
    kv_heads, layers = config.num_key_value_heads, config.num_hidden_layers
    assert cpu["kv_bytes_a_token"] == 4 * layers * kv_heads * (config.head_dim + 64)
    assert found["parameters"] == stored // 4

    assert found["grid"] is None

    text = run("inspect", model).stdout
    assert "grid          none found\n" in text
    assert "tokenizer     tokenizer.json, chat template\n" in text
    assert "rope_theta               10000.0\n" in text
    for name in shapes:
        assert f"\n{name} " in text


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's account of a process's memory")
def test_inspect_reads_next_to_no_tensor_data(tmp_path: Path) -> None:
    """A model of 27 GB that takes no disk: its file is a header and a hole."""
    config = tiny_config(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        head_dim=128,
    )
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    header, end = {}, 0
    for name, shape in config.tensor_shapes().items():
        begin, end = end, end + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    try:
        os.truncate(path, 8 + len(text) + end)
    except OSError as error:
        pytest.skip(f"no sparse file of {end} bytes here: {error}")
    code = (
        "import atexit; from pathlib import Path; from pronk.cli import main\n"
        "atexit.register(lambda: print(Path('/proc/self/status').read_text()))\n"
        "main()"
    )
    command = [sys.executable, "-c", code, "inspect", str(tmp_path), "--json"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (peak,) = (int(line.split()[1]) * 1024 for line in shown.splitlines() if line.startswith("VmHWM"))
    assert end > 25e9
    assert peak < 200e6


def test_inspect_says_on_which_grid_weights_lie(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(hidden_size=96)
    weights = random_weights(config)
    for name, array in weights.items():
        weights[name] = quantize(array, "q4").dequantize() if array.ndim == 2 else array
    save_huggingface(tmp_path, config, weights)
    assert "grid          weights lie on a grid of 4 bits (multiplied out)\n" in run("inspect", str(tmp_path)).stdout
    found = json.loads(run("inspect", str(tmp_path), "--json").stdout)["grid"]
    assert (found["bits"], found["formats"], found["exact"]) == (4, ["q4"], True)

    def broken(checkpoint: object) -> None:
        raise BadFile("there", "is broken")

    monkeypatch.setattr("pronk.checkpoint.grid.find", broken)
    result = run("inspect", str(tmp_path))
    assert (result.exit_code, result.stderr) == (0, "the weights were not looked at: there: is broken\n")


def test_verify(run: Run, model: str, tmp_path: Path) -> None:
    result = run("verify", model, "--device", "cpu")
    assert result.exit_code == 0
    assert "\ncached " in result.stdout
    assert "\nverdict: " in result.stdout
    text = tmp_path / "text.txt"
    text.write_text("A text of its own.")
    found = json.loads(run("verify", model, "--device", "cpu", "--json", "-f", str(text)).stdout)
    assert found["tokens"] == len("A text of its own.")
    assert [path["path"] for path in found["paths"]] == ["cached", "chunked", "batched"]


def test_verify_says_how_much_of_a_text_it_took(run: Run, model: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("x" * 300)
    result = run("verify", model, "--device", "cpu", "-f", str(text))
    assert "the logits of the first 256 of 300 tokens (see -n) against" in result.stdout
    found = json.loads(run("verify", model, "--device", "cpu", "-n", "300", "--json", "-f", str(text)).stdout)
    assert (found["tokens"], found["text_tokens"]) == (300, 300)


def test_tensors_are_listed_in_the_order_of_layers(run: Run, tmp_path: Path) -> None:
    config = tiny_config(num_hidden_layers=12)
    save_huggingface(tmp_path, config, random_weights(config))
    tensors = json.loads(run("inspect", str(tmp_path), "--json").stdout)["tensors"]
    layers = [int(t["name"].split(".")[2]) for t in tensors if ".layers." in t["name"]]
    assert layers == sorted(layers)
    assert max(layers) == 11


def test_layers_that_are_alike_are_one_line(run: Run, tmp_path: Path) -> None:
    """Of 30 layers there were 272 lines, and what comes before them had left the screen."""
    config = tiny_config(num_hidden_layers=12)
    weights = random_weights(config)
    odd = "model.layers.5.mlp.down_proj.weight"
    save_huggingface(tmp_path, config, {**weights, odd: weights[odd].astype(np.float16)})
    lines = run("inspect", str(tmp_path)).stdout.splitlines()
    found = [line.split()[0] for line in lines if line.startswith("model.layers.")]
    assert "model.layers.0-11.mlp.up_proj.weight" in found
    down = [name for name in found if name.endswith(".mlp.down_proj.weight")]
    assert down == [f"model.layers.{layers}.mlp.down_proj.weight" for layers in ("0-4", "5", "6-11")]
    assert len(found) == len({name.split(".", 3)[3] for name in weights if ".layers." in name}) + 2
    norm = next(line for line in lines if line.startswith("model.layers.0-11.input_layernorm.weight"))
    assert norm.split()[-1] == f"{4 * config.hidden_size:,}"


@pytest.mark.parametrize("engine", ["cpu", "torch"])
def test_verify_training(run: Run, model: str, engine: str) -> None:
    result = run("verify", model, "--training", "--engine", engine, "--threads", "1", "-n", "20")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert f"an adapter of random numbers: {engine} engine in f32 on cpu" in lines[0]
    assert sum(line.endswith(("identical", "rounding")) for line in lines) == 12
    assert lines[-1].startswith("verdict: ")
    found = json.loads(run("verify", model, "--training", "--engine", engine, "-n", "20", "--json").stdout)
    assert (found["tokens"], found["adapter"]) == (20, None)


@pytest.mark.parametrize("option", [["--quantize", "q4"], ["--compute-dtype", "bf16"], ["--kv-dtype", "int8"]])
def test_training_is_verified_in_float32(run: Run, model: str, option: list[str]) -> None:
    result = run("verify", model, "--training", *option)
    assert result.exit_code == 2
    assert f"compares float32 with float32; leave {' '.join(option)} out" in result.stderr


def test_verify_mistakes(run: Run, model: str, tmp_path: Path) -> None:
    result = run("verify", model, "--mistakes", "-n", "5", "-p", "Once", "--device", "cpu", "--threads", "1")
    assert result.exit_code == 0, result.stderr
    head, _, prompt, columns, *ways, _, where, future = result.stdout.splitlines()
    assert head == f"{model}: torch engine in f32 on cpu; the likeliest 5 tokens after each prompt"
    assert (prompt, columns.split()) == ('"Once"', ["where", "text"])
    assert [way.split("  ")[0] for way in ways] == [
        "with the cache",
        "without it, done right",
        "last token only",
        "no causal mask",
        "positions not moved on",
    ]
    assert ways[0].split("  ")[-1] == ways[1].split("  ")[-1]
    assert where.startswith("where: the first new token")
    assert "moves the logits before it by nothing without a cache; by " in future
    (tmp_path / "prompt.txt").write_text("from a file")
    options = ["-n", "2", "-p", "a", "-f", str(tmp_path / "prompt.txt"), "--json"]
    found = json.loads(run("verify", model, "--mistakes", "--device", "cpu", *options).stdout)
    assert [entry["prompt"] for entry in found["prompts"]] == ["a", "from a file"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--mistakes --training", "--mistakes and --training exclude each other"),
        ("--mistakes --engine cpu", "--mistakes takes a mask away, which --engine cpu cannot"),
        ("--mistakes --attn flash", "which --attn flash cannot"),
        ("-p prompt", "-p is for --mistakes"),
        ("-n 1", "verification needs at least 2 tokens"),
    ],
)
def test_verify_mistakes_refuses(run: Run, model: str, options: str, said: str) -> None:
    result = run("verify", model, *options.split())
    assert result.exit_code == 2
    assert said in result.stderr


def test_verify_mistakes_shows_how_far_it_is(run: Run, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was silent for as long as it took: minutes, for a model of some size."""
    monkeypatch.setattr(pronk.cli.progress, "LOGGED_APART", 0.0)
    result = run("verify", model, "--mistakes", "--max-tokens", "2", "-p", "x", "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    assert "writing texts: text 1 of 5" in result.stderr


def test_verify_with_an_adapter_that_is_none(run: Run, model: str, tmp_path: Path) -> None:
    result = run("verify", model, "--training", "--adapter", str(tmp_path), "--device", "cpu")
    assert result.exit_code == 1
    assert "no adapter in this folder" in result.stderr


def test_verify_exits_with_1_for_a_bug(run: Run, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that forgets where a chunk begins."""
    honest = LLM.logits

    def forgetful(self: LLM, ids: list[int], *, cache: bool = False, chunk: int | None = None) -> object:
        logits = honest(self, ids, cache=cache, chunk=chunk)
        return np.roll(logits, 1, axis=0) if cache else logits

    monkeypatch.setattr(LLM, "logits", forgetful)
    result = run("verify", model, "--device", "cpu")
    assert result.exit_code == 1
    assert "verdict: bug" in result.stdout
    assert json.loads(run("verify", model, "--device", "cpu", "--json").stdout)["verdict"] == "bug"


@pytest.mark.parametrize(
    ("to", "more", "exact"),
    [
        ("safetensors", [], True),
        ("safetensors", ["--dtype", "bf16"], False),
        ("gguf", [], True),
        ("gguf", ["--dtype", "q8_0"], False),
        ("llama2c", [], True),
        ("llama2c", ["--version", "1"], True),
        ("llama2c", ["--version", "2", "--group-size", "32"], False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_convert_ends_with_a_receipt(
    run: Run, model: str, tmp_path: Path, to: str, more: list[str], exact: bool
) -> None:
    destination = tmp_path / "converted"
    result = run("convert", model, str(destination), "--to", to, *more, "--json")
    assert result.exit_code == 0, result.stderr
    receipt = json.loads(result.stdout)
    assert receipt["dst"] == str(destination)
    assert receipt["tokens"] > 100
    # Text and numbers must agree: a stranger's logits differ by more than 1.
    assert (receipt["max_abs_difference"] == 0) == exact
    assert receipt["max_abs_difference"] < 0.5
    assert json.loads(run("inspect", str(destination), "--json").stdout)["format"] == receipt["format"]


def test_convert_in_words(run: Run, model: str, tmp_path: Path) -> None:
    result = run("convert", model, str(tmp_path / "m.gguf"), "--to", "gguf")
    first, second = result.stdout.splitlines()
    assert first.startswith(f"{tmp_path / 'm.gguf'}: gguf, ")
    assert second.startswith("largest logit difference 0 over ")
    assert second.endswith("; greedy tokens differ nowhere")


def test_a_rotated_twin_ends_with_a_receipt_that_says_rounding(run: Run, model: str, tmp_path: Path) -> None:
    twin = str(tmp_path / "twin")
    result = run("convert", model, twin, "--to", "safetensors", "--rotate", "5", "--json")
    assert result.exit_code == 0, result.stderr
    receipt = json.loads(result.stdout)
    assert (receipt["rotate"], receipt["verdict"]) == (5, "rounding")
    assert 0 < receipt["worst_rms_difference"] <= receipt["allowed"] == 10 * receipt["noise_floor"]
    config = json.loads(run("inspect", twin, "--json").stdout)["config"]
    assert config["tie_word_embeddings"] is False
    text = run("convert", model, twin, "--to", "safetensors", "--rotate", "5", "--overwrite").stdout
    assert text.endswith(": the same function, but for rounding\n")


def test_a_twin_that_is_another_function_is_called_one(
    run: Run, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pronk.checkpoint import rotation

    monkeypatch.setattr(rotation, "_norm_before", lambda name: None)
    result = run("convert", model, str(tmp_path / "twin"), "--to", "safetensors", "--rotate", "5")
    assert "more than rounding in f32" in result.stdout


def test_convert_says_when_the_tokenizer_stays_behind(run: Run, model: str, tmp_path: Path) -> None:
    result = run("convert", model, str(tmp_path / "m.bin"), "--to", "llama2c")
    assert result.exit_code == 0
    assert result.stderr.startswith("the tokenizer is not written: ")


@pytest.mark.parametrize(
    ("more", "code"),
    [
        (["--to", "safetensors", "--dtype", "q8_0"], 2),
        (["--to", "onnx"], 2),
        (["--to", "gguf", "--version", "2"], 2),
        (["--to", "gguf", "--group-size", "32"], 2),
        (["--to", "llama2c", "--group-size", "32"], 2),
        (["--to", "llama2c", "--version", "1", "--group-size", "32"], 2),
        (["--to", "llama2c", "--version", "2", "--group-size", "7"], 1),
        (["--to", "gguf", "--tokenizer", "/no/such/file"], 1),
        (["--to", "gguf", "--rotate", "-1"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_a_refused_conversion_leaves_nothing_behind(
    run: Run, model: str, tmp_path: Path, more: list[str], code: int
) -> None:
    result = run("convert", model, str(tmp_path / "converted"), *more)
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.count("\n") == code
    assert list(tmp_path.iterdir()) == []


def test_convert_replaces_only_when_told_to(run: Run, model: str, tmp_path: Path) -> None:
    destination = tmp_path / "m.gguf"
    destination.write_text("mine")
    result = run("convert", model, str(destination), "--to", "gguf")
    assert (result.exit_code, destination.read_text()) == (1, "mine")
    assert result.stderr.startswith(f"pronk: {destination} exists")
    assert run("convert", model, str(destination), "--to", "gguf", "--overwrite").exit_code == 0
    assert destination.read_bytes()[:4] == b"GGUF"


def test_a_model_that_is_written_but_cannot_be_read_back(
    run: Run, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*arguments: object, **options: object) -> None:
        raise pronk.errors.PronkError("no engine")

    monkeypatch.setitem(vars(pronk), "load", load)
    result = run("convert", model, str(tmp_path / "m.gguf"), "--to", "gguf")
    assert result.exit_code == 1
    assert result.stderr == f"pronk: {tmp_path / 'm.gguf'} is written and complete, but cannot be measured: no engine\n"


@pytest.mark.parametrize("verb", ["generate", "chat", "inspect", "verify", "convert", "pull"])
@pytest.mark.parametrize("name", ["no-such-model", "./nowhere.gguf", "{folder}"])
def test_what_is_no_model(run: Run, tmp_path: Path, verb: str, name: str) -> None:
    name = name.format(folder=tmp_path)
    arguments = ["-m", name] if verb in ("generate", "chat") else [name]
    if verb == "convert":
        arguments += [str(tmp_path / "converted"), "--to", "gguf"]
    result = run(verb, *arguments, input="hi\n")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("pronk: ")
    assert result.stderr.count("\n") == 1
    assert name in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_prompt_that_does_not_fit(run: Run, model: str) -> None:
    common = ["generate", "--device", "cpu", "-m", model, "-n", "4", "-c", "32"]
    result = run(*common, "x" * 40)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("pronk: the prompt has 40 tokens and at most 31 fit")
    assert result.stderr.count("\n") == 1
    result = run(*common, "--truncate", "right", "x" * 40)
    assert result.exit_code == 0
    assert result.stderr.startswith("28 prompt tokens (12 cut)")
    assert json.loads(run(*common, "--truncate", "left", "--json", "x" * 40).stdout)["truncated_tokens"] == 12


def test_a_prompt_that_is_no_text(run: Run, model: str) -> None:
    result = run(
        "generate", "--device", "cpu", "-m", model, "caf\udce9"
    )  # how Python hands over bytes that are not UTF-8
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("pronk: ")
    assert result.stderr.count("\n") == 1


def test_pull_prints_where(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pronk.checkpoint.hub import resolve as hub

    asked = []

    def pull(name: str, *, revision: str | None = None) -> Path:
        asked.append((name, revision))
        return tmp_path / "model.gguf"

    monkeypatch.setattr(hub, "pull", pull)
    result = run("pull", "owner/name", "--revision", "v2")
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path / 'model.gguf'}\n")
    assert asked == [("owner/name", "v2")]


def test_list(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pronk.checkpoint.hub import resolve as hub

    models = [hub.CachedModel("smollm2:135m", None, 98_362_432), hub.CachedModel("owner/name", tmp_path, 1_500_000_000)]
    monkeypatch.setattr(hub, "cached", lambda: models)
    assert run("list").stdout == (
        f"smollm2:135m  98.4 MB  not here; pronk pull smollm2:135m\nowner/name     1.5 GB  {tmp_path}\n"
    )
    assert json.loads(run("list", "--json").stdout) == [
        {"name": "smollm2:135m", "path": None, "bytes": 98_362_432},
        {"name": "owner/name", "path": str(tmp_path), "bytes": 1_500_000_000},
    ]
