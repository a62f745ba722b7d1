"""`pronk perplexity` and `pronk divergence` on a tiny model: figures, tables, and refusals in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.numpy
from click.testing import Result
from formats import save_huggingface
from tiny import random_weights, tiny_config
from tiny_folder import save_tiny_chat_model

import pronk
from pronk.checkpoint import grid
from pronk.formats.quantize import quantize
from pronk.measure.divergence import divergence, noise_floor
from pronk.measure.perplexity import perplexity
from pronk.measure.windows import evaluation_text

Run = Callable[..., Result]
TEXT = "The text is read in windows, and the second half of each of them counts. " * 4  # 292 bytes, a token each


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


CPU = ("--engine", "cpu", "--threads", "1")


def test_perplexity_is_the_librarys(run: Run, model: str, text: str) -> None:
    llm = pronk.load(model, engine="cpu", threads=1)
    ids = llm.tokenizer.encode(TEXT)
    found = json.loads(run("perplexity", model, "--text", text, "--ctx", "64", "--json", *CPU).stdout)
    assert found["value"] == perplexity(llm, ids, ctx=64)["value"]
    assert (found["text"], found["tokens"], found["windows"], found["dtype"]) == (text, 292, 4, "f32")
    strided = json.loads(run("perplexity", model, "-f", text, "--ctx", "64", "--stride", "32", "--json", *CPU).stdout)
    assert strided["value"] == perplexity(llm, ids, ctx=64, stride=32)["value"] != found["value"]
    piped = json.loads(run("perplexity", model, "-f", "-", "--ctx", "64", "--json", *CPU, input=TEXT).stdout)
    assert piped["value"] == found["value"]


@pytest.mark.parametrize("verb", ["perplexity", "divergence"])
def test_special_tokens_of_a_text_are_text_unless_told(run: Run, model: str, tmp_path: Path, verb: str) -> None:
    llm, path = pronk.load(model, engine="cpu", threads=1), tmp_path / "text.txt"
    path.write_text(text := TEXT + "<s>hello</s>" * 9)
    command = [verb, model, "--text", str(path), "--ctx", "64", "--json", *CPU]
    command += ["--quantize", "int8"] if verb == "divergence" else []
    for more, special in ([], False), (["--parse-special"], True):
        found = json.loads(run(*command, *more).stdout)
        assert found["tokens"] == len(llm.tokenizer.encode(text, special=special))
        if verb == "perplexity":
            ids = llm.tokenizer.encode(text, special=special)
            llm_ = pronk.load(model, engine="cpu", threads=1, quantize="auto")
            assert found["value"] == perplexity(llm_, ids, ctx=64)["value"]


@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\n\n"])
def test_the_last_newline_of_a_text_is_measured(run: Run, model: str, tmp_path: Path, end: str) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes((TEXT + end).encode())
    for given, more in ((str(path), {}), ("-", {"input": (TEXT + end).encode()})):
        found = json.loads(run("perplexity", model, "--text", given, "--ctx", "64", "--json", *CPU, **more).stdout)
        assert found["tokens"] == 292 + len(end)


def test_several_models_are_compared_with_the_first_window_by_window(run: Run, model: str, text: str) -> None:
    """Perplexities of one text were compared as if of two: what all of them find hard was their error."""
    common = ["-f", text, "--ctx", "64", *CPU]
    alone = json.loads(run("perplexity", model, *common, "--json").stdout)
    first, second = json.loads(run("perplexity", model, model, *common, "--json").stdout)["models"]
    assert {**first, "provenance": 0} == {**alone, "provenance": 0}  # which says when
    second["provenance"] = first["provenance"]
    assert {**first, "beside_first": second["beside_first"]} == second
    assert second["beside_first"] == {"log_ratio": 0, "standard_error": 0, "clear": False}
    assert "paired by windows: may be chance on this text" in run("perplexity", model, model, *common).stdout


def test_perplexity_says_its_protocol(run: Run, model: str, text: str) -> None:
    lines = run("perplexity", model, "--text", text, "--ctx", "64", *CPU).stdout.splitlines()
    assert lines[0].startswith("perplexity ")
    assert " ± " in lines[0]
    assert "llama.cpp's: windows of 64 tokens side by side; tokens 33 to 63 of each count" in "".join(lines)
    alone = run("perplexity", model, "--text", text, "--ctx", "64", "--windows", "1", *CPU).stdout
    assert "±" not in alone
    assert "unknown: there is one window only" in alone


@pytest.mark.parametrize("verb", ["perplexity", "divergence"])
def test_who_asks_for_more_windows_than_there_are_is_told(run: Run, model: str, text: str, verb: str) -> None:
    common = (verb, model, "--text", text, "--ctx", "64", *(["--quantize", "q8"] if verb == "divergence" else []), *CPU)
    assert "--windows 9: the text has 4, all of which are measured" in run(*common, "--windows", "9").stderr
    assert "--windows" not in run(*common, "--windows", "4").stderr + run(*common).stderr  # a default asks for nothing


def test_the_text_that_comes_with_pronk(run: Run, model: str) -> None:
    found = json.loads(run("perplexity", model, "--ctx", "64", "--windows", "3", "--json", *CPU).stdout)
    assert (found["text"], found["tokens"]) == ("pronk's own text", len(evaluation_text().encode()))
    assert found["windows"] == 3


def test_divergence_of_a_quantization_from_f32(run: Run, model: str, text: str) -> None:
    one, other = (pronk.load(model, quantize=q, engine="cpu", threads=1) for q in ("f32", "int8"))
    ids = one.tokenizer.encode(TEXT)
    common = ["divergence", model, "--quantize", "int8", "-f", text, "--ctx", "64", *CPU]
    found = json.loads(run(*common, "--json").stdout)
    assert found["divergence"] == divergence(one, other, ids, ctx=64)
    assert found["reference_floor"] == noise_floor(one, ids, ctx=64)
    assert found["own_floor"] == noise_floor(other, ids, ctx=64)
    assert (found["reference"]["dtype"], found["own"]["dtype"], found["verdict"]) == ("f32", "int8", "different")
    shown = run(*common).stdout
    assert f"{found['divergence']['mean']:.3g} ±" in shown
    assert "which rounding noise does not explain" in shown
    for word in ("floor: A", "floor: B", "99% below", "same likeliest token", "perplexity  A "):
        assert word in shown


def test_a_format_that_has_the_grid_of_the_weights_is_said_to_be_flattered(run: Run, text: str, tmp_path: Path) -> None:
    """q4 of weights that were q4 before is nearly free, where q8 has its price: neither says so of other models."""
    folder = save_tiny_chat_model(tmp_path / "model")
    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    for name, array in weights.items():
        weights[name] = quantize(array, "q4").dequantize() if array.ndim == 2 else array
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    common = ["divergence", str(folder), "-f", text, "--ctx", "64", "--json", *CPU]
    shown = {format: run(*common, "--quantize", format) for format in ("q4", "q8")}
    found = {format: json.loads(result.stdout) for format, result in shown.items()}
    note = (
        "A: weights lie on a grid of 4 bits (multiplied out). Much of it q4 holds for nothing, so it looks free here; "
    )
    assert (
        shown["q4"].stderr
        == f"{note}to see what it costs other models, compare a copy made with: pronk convert --rotate\n"
    )
    assert "grid" not in shown["q8"].stderr
    assert found["q4"]["grid"] == found["q8"]["grid"] == grid.find(pronk.load(folder).checkpoint).as_dict()
    assert found["q4"]["grid"]["formats"] == ["q4"]


def test_weights_on_no_grid_are_said_to_be(run: Run, model: str, text: str) -> None:
    result = run("divergence", model, "--quantize", "q4", "-f", text, "--ctx", "64", "--json", *CPU)
    assert (json.loads(result.stdout)["grid"], result.stderr) == (None, "")


def test_a_single_window_is_no_ground_for_a_verdict(run: Run, model: str, text: str) -> None:
    common = ["divergence", model, "--quantize", "int8", "-f", text, "--ctx", "64", "--windows", "1", *CPU]
    found = json.loads(run(*common, "--json").stdout)
    assert (found["divergence"]["standard_error"], found["verdict"]) == (None, "unknown")
    assert "A single window has no standard error" in run(*common).stdout


def test_int8_keys_and_values_have_a_cost_of_their_own(run: Run, model: str, text: str) -> None:
    found = json.loads(run("divergence", model, "--kv-dtype", "int8", "-f", text, "--ctx", "64", "--json", *CPU).stdout)
    assert (found["own"]["dtype"], found["own"]["kv_dtype"]) == ("f32", "int8")
    assert (found["reference"]["dtype"], found["reference"]["kv_dtype"]) == ("f32", "f32")
    assert found["divergence"]["mean"] > 100 * found["reference_floor"]["mean"]


def test_two_models_and_other_references(run: Run, model: str, text: str) -> None:
    same = run("divergence", model, model, "-f", text, "--ctx", "64", *CPU).stdout  # stored in f32
    assert "cannot be told apart" in same
    found = json.loads(
        run("divergence", model, model, "--reference", "bf16", "-f", text, "--ctx", "64", "--json", *CPU).stdout
    )
    assert (found["reference"]["dtype"], found["own"]["dtype"]) == ("bf16", "f32")


def test_on_the_torch_engine(run: Run, model: str, text: str) -> None:
    bf16 = ("--engine", "torch", "--quantize", "bf16", "--device", "cpu")
    found = json.loads(run("divergence", model, *bf16, "-f", text, "--ctx", "64", "--json").stdout)
    assert [found[side]["engine"] for side in ("reference", "own")] == ["torch", "torch"]
    assert [found[side]["dtype"] for side in ("reference", "own")] == ["f32", "bf16"]
    assert 0 < found["reference_floor"]["mean"] < found["divergence"]["mean"]
    assert not found["own_floor"]["batch_invariant"]


def test_tokens_that_share_scales_are_said_to(run: Run, model: str, text: str) -> None:
    common = ["--quantize", "absmax", "--device", "cpu", "-f", text, "--ctx", "64"]
    assert "batch     each window is one, whose tokens share scales" in run("perplexity", model, *common).stdout
    assert "batch: each window is one, whose tokens share scales" in run("divergence", model, *common).stdout
    found = json.loads(run("divergence", model, *common, "--json").stdout)
    assert [found[name]["one_batch"] for name in ("divergence", "reference_floor", "own_floor")] == [True, False, True]


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        # Once -c was the most that a text may take: who typed it as in llama.cpp had windows of 512 without a word.
        ("perplexity MODEL --text TEXT -c 300", 1, "the text has 292 tokens, and a window takes 300"),
        ("divergence MODEL --quantize int8 --text TEXT --ctx-size 300", 1, "and a window takes 300"),
        ("perplexity MODEL --text TEXT --ctx 300", 1, "the text has 292 tokens, and a window takes 300"),
        ("perplexity MODEL --text TEXT --ctx 64 --stride 65", 2, "--stride 65 would skip tokens"),
        ("perplexity MODEL --text TEXT --ctx 128 --max-model-len 64", 2, "--ctx is too long: 127 tokens of"),
        ("perplexity MODEL --text nowhere.txt", 1, "nowhere.txt: No such file"),
        ("perplexity MODEL --text TEXT --ctx 3", 2, "3 is not in the range"),
        ("divergence MODEL --quantize int8 --text TEXT", 1, "the text has 292 tokens, and a window takes 512"),
        ("divergence MODEL --text TEXT", 2, "an option that makes it differ, as --quantize llm-int8"),
        ("perplexity MODEL SHIFTED --text TEXT --ctx 64", 1, "cut the text into different tokens"),
        ("divergence MODEL OTHER --text TEXT --ctx 64", 1, "predicts 259 tokens and"),
        ("divergence MODEL SHIFTED --text TEXT --ctx 64", 1, "cut the text into different tokens"),
        ("divergence BARE BARE --text TEXT --ctx 64", 1, "carries no tokenizer"),
    ],
)
def test_one_clear_line(run: Run, model: str, text: str, tmp_path: Path, arguments: str, code: int, line: str) -> None:
    for name, size in (("OTHER", 260), ("BARE", 259)):
        config = tiny_config(vocab_size=size)
        save_huggingface(tmp_path / name, config, random_weights(config))
    if "SHIFTED" in arguments:
        tokenizer = Path(save_tiny_chat_model(tmp_path / "SHIFTED")) / "tokenizer.json"
        spelled = json.loads(tokenizer.read_text())
        vocabulary = spelled["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
        tokenizer.write_text(json.dumps(spelled))
    paths = {"MODEL": model, "TEXT": text, **{name: str(tmp_path / name) for name in ("OTHER", "BARE", "SHIFTED")}}
    result = run(*(paths.get(word, word) for word in arguments.split()), *CPU)
    assert result.exit_code == code
    assert line in result.stderr.splitlines()[0]
    assert result.stdout == ""
