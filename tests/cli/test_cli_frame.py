"""The program as a whole: how fast it answers, what it exits with, and what it never prints."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import fields
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from fake_llm import FakeLLM
from formats import save_huggingface
from tiny import random_weights, tiny_config
from tiny_folder import save_tiny_chat_model

from pronk import __version__
from pronk.cli import VERBS, generate, group, options, progress, typed
from pronk.cli.failures import Misuse

Run = Callable[..., Result]
Start = Callable[[list[str]], subprocess.Popen[str]]


def _command(verb: str) -> click.Command:
    found = group.get_command(click.Context(group), verb)
    assert found
    return found


@pytest.fixture
def start() -> Iterator[Callable[[list[str]], subprocess.Popen[str]]]:
    """Processes with pipes, all closed in the end."""
    with ExitStack() as stack:

        def start(command: list[str]) -> subprocess.Popen[str]:
            pipe = subprocess.PIPE
            return stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True))

        yield start


def test_help_loads_nothing_heavy() -> None:
    code = "import sys; sys.argv = ['pronk', '--help']; import atexit; atexit.register(lambda: print(*sys.modules))"
    shown = subprocess.run(
        [sys.executable, "-c", code + "; from pronk.cli import main; main()"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    loaded = set(shown.splitlines()[-1].split())
    assert {"click", "pronk.cli.generate"} <= loaded
    heavy = {
        "numpy",
        "torch",
        "tqdm",
        "tokenizers",
        "jinja2",
        "huggingface_hub",
        "pronk.llm",
        "pronk.config.model_config",
    }
    assert not heavy & loaded


def test_a_first_token_waits_for_nothing_that_it_does_not_need(tmp_path: Path) -> None:
    """Starts had grown by a thirtieth: readers of other files, adapters, what looks at patterns that are not there."""
    config, model = tiny_config(vocab_size=259), tmp_path / "m.gguf"
    save_huggingface(save_tiny_chat_model(tmp_path / "source"), config, random_weights(config))
    assert CliRunner().invoke(group, ["convert", str(tmp_path / "source"), str(model)]).exit_code == 0
    code = f"import sys, atexit; sys.argv = ['pronk', 'generate', '-m', {str(model)!r}, '-n', '1', 'a']"
    code += "; atexit.register(lambda: print('', *sys.modules, sep='\\n')); from pronk.cli import main; main()"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = set(shown.splitlines())
    assert {"pronk.cpu_engine.backend", "pronk.checkpoint.readers.gguf"} <= loaded
    readers = {f"pronk.checkpoint.readers.{name}" for name in ("huggingface", "meta", "llama2c")}
    others = {"pronk.checkpoint.adapter", "pronk.tokenizer.patterns", "pronk.tokenizer.charsmap", "torch"}
    assert loaded & (readers | others) == set()


def test_help_takes_as_long_as_a_few_modules_of_python_s_own() -> None:
    """A fifth of a second of a recent processor: the yardstick makes it a test on any."""
    ours, theirs = [], []
    for _ in range(5):  # other programs share the processor's caches
        ours.append(processor_time("-m", "pronk", "--help"))
        theirs.append(processor_time("-c", "import asyncio, http.server, unittest.mock, xml.dom.minidom"))
        if len(ours) > 2 and min(ours) < 2 * min(theirs):
            break
    assert min(ours) < 2 * min(theirs), (ours, theirs)


def processor_time(*arguments: str) -> float:
    before = os.times()
    compiled = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}  # as users have it
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, env=compiled)
    after = os.times()
    return sum(after[2:4]) - sum(before[2:4])


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_examples(run: Run, verb: str) -> None:
    result = run(verb, "--help")
    assert result.exit_code == 0
    assert f"Examples:\n  pronk {verb}" in re.sub(r"^  ", "", result.stdout, flags=re.M)
    assert run(verb, "-h").stdout == result.stdout


def test_the_summary_of_every_verb_fits_a_line_of_80_columns(run: Run) -> None:
    """They were cut with "...": click keeps what fits into the width that it finds."""
    shown = run("--help").stdout
    for verb in VERBS:
        said = _command(verb).get_short_help_str(100)
        assert f"\n  {verb:<16}  {said}\n" in shown
        assert not said.endswith("...")


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_is_explained_in_whole_clauses(run: Run, verb: str) -> None:
    """With its defaults and bounds in one pair of brackets, as click sets its own, not in two."""
    for option in _command(verb).params:
        if isinstance(option, click.Option):
            assert option.help, f"{verb} {option.opts} has no help"
            assert option.help.removesuffix("]").split("  [")[0][-1] in ".)", f"{verb} {option.opts}: {option.help}"
    assert not re.search(r"\]\s+\[(default|required|\d|x)", run(verb, "--help").stdout)


@pytest.mark.parametrize("verb", ["generate", "chat", "finetune", "dpo", "reward", "pretrain", "compare"])
def test_many_options_stand_under_headings(run: Run, verb: str) -> None:
    shown = run(verb, "--help").stdout
    assert len(re.findall(r"^\S.*:$", shown, flags=re.M)) >= 4
    left = shown.split("\nOptions:\n")[1].split("\n\n")[0]
    assert re.findall(r"^  (-\S+)", left, re.M) == [
        "--config",
        "--save-config",
        "-h,",
    ]  # alone: what is declared has a heading
    for option in _command(verb).params:
        hidden = isinstance(option, click.Argument) or getattr(option, "hidden", False)
        assert hidden or re.search(rf"^ .*{option.opts[-1]}\b", shown, flags=re.M)


def test_version(run: Run) -> None:
    assert run("--version").stdout == f"pronk {__version__}\n"


def test_defaults_are_those_of_the_library(run: Run, loaded: list[FakeLLM]) -> None:
    from pronk.checkpoint.hub import resolve as hub
    from pronk.engine.params import SamplingParams

    run("generate", "x")
    assert loaded[0].calls[0]["params"] == SamplingParams()
    assert {p.name for p in generate.command.params} >= {field.name for field in fields(SamplingParams)} - {"n"}
    assert hub.DEFAULT_MODEL == options.DEFAULT_MODEL


def test_a_prompt_of_several_words_needs_no_verb(run: Run, loaded: list[FakeLLM]) -> None:
    assert run("Once upon a time", "-n", "2").stdout == "word0 word1 \n"
    assert loaded[0].calls[0]["prompt"] == "Once upon a time"


def test_a_mistyped_verb_is_no_prompt(run: Run, loaded: list[FakeLLM]) -> None:
    result = run("genrate")
    assert (result.exit_code, result.stdout, loaded) == (2, "", [])
    assert result.stderr == (
        "pronk: no verb 'genrate'; did you mean generate? "
        "(a prompt goes in quotes; one of a single word: pronk generate PROMPT)\n"
        "Try 'pronk --help'.\n"
    )
    assert "no verb 'Hello'; there are generate, chat, " in run("Hello").stderr
    assert run("orpo", "m").stderr.splitlines()[0] == "pronk: no verb 'orpo'; it is pronk dpo --loss orpo"


def test_a_mistyped_option_is_told_the_nearest(run: Run) -> None:
    assert run("generate", "--temprature", "1", "x").stderr == (
        "pronk: no such option --temprature; did you mean --temperature?\nTry 'pronk generate --help'.\n"
    )


@pytest.mark.parametrize("wrong", ["--frobnicate", "generate -n", "inspect", "convert a b", "list x"])
def test_wrong_usage_is_two_lines(run: Run, wrong: str) -> None:
    result = run(*wrong.split())
    assert (result.exit_code, result.stdout) == (2, "")
    problem, hint = result.stderr.splitlines()
    assert problem.startswith("pronk: ")
    whose = "pronk" if wrong.startswith("-") else f"pronk {wrong.split()[0]}"
    assert hint == f"Try '{whose} --help'."


def test_no_arguments_are_a_call_for_help(run: Run) -> None:
    assert run().output == run("--help").output


@pytest.mark.parametrize("option", ["-m", "--tokenizer", "--revision", "--device", "-f"])
def test_an_empty_name_is_not_the_default(run: Run, loaded: list[FakeLLM], option: str) -> None:
    result = run("generate", option, "", "-n1", input="")
    assert (result.exit_code, result.stdout, loaded) == (2, "", [])
    assert "must not be empty" in result.stderr


def test_underscores_in_option_names(run: Run, loaded: list[FakeLLM]) -> None:
    assert run("generate", "--max_new_tokens", "2", "--presence_penalty=1.5", "x").stdout == "word0 word1 \n"
    assert loaded[0].calls[0]["params"].presence_penalty == 1.5
    run("generate", "-n", "1", "--", "--top_k=7")
    assert loaded[1].calls[0]["prompt"] == "--top_k=7"


@pytest.mark.parametrize(
    "wrong",
    [
        ["--temperature", "nan"],
        ["--temperature", "warm"],
        ["--top-p", "1.5"],
        ["-n", "0"],
        ["--num-beams", "0"],
        ["--num-beams", "2", "--num-return-sequences", "3"],
        ["--num-beams", "2", "--seed", "1"],
        ["--num-beams", "2", "--rng", "numpy"],
        ["--threads", "0"],
        ["--compute-dtype", "f64"],
        ["--rng", "dice"],
        ["--logit-bias", "five=1"],
        ["--logit-bias", "5=much"],
        ["--logit-bias", "5=nan"],
        ["--truncate", "middle"],
        ["--stop", ""],
        ["--no-such-option"],
        ["-f", "prompt.txt"],  # and a PROMPT as well
        ["--echo", "--json"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2_before_anything_is_loaded(run: Run, loaded: list[FakeLLM], wrong: list[str]) -> None:
    result = run("generate", *wrong, "some prompt")
    assert (result.exit_code, result.stdout, loaded) == (2, "", [])
    assert result.stderr.startswith("pronk: ")
    assert result.stderr.endswith("\nTry 'pronk generate --help'.\n")
    assert result.stderr.count("\n") == 2
    assert "Traceback" not in result.stderr


def test_an_error_is_one_line_and_1(run: Run, loaded: list[FakeLLM]) -> None:
    result = run("generate", "fail", "-n", "3")
    assert (result.exit_code, result.stdout) == (1, "word0 \n")
    assert result.stderr.startswith("pronk: model.bin at byte 3: broken")
    assert result.stderr.count("\n") == 1


def test_a_bug_keeps_its_traceback(run: Run, loaded: list[FakeLLM]) -> None:
    with pytest.raises(ZeroDivisionError):
        run("generate", "bug", "-n", "3")


def first_word(process: subprocess.Popen[str]) -> str:
    """As the file has it: read through the text that Popen makes of it, the words behind it would be gone for good."""
    assert process.stdout is not None
    found = b""
    while len(found) < 6 and (piece := os.read(process.stdout.fileno(), 6 - len(found))):
        found += piece
    return found.decode()


def test_ctrl_c_while_generating(start: Start, fake_pronk: list[str]) -> None:
    process = start([*fake_pronk, "generate", "slow", "-n", "1000"])
    assert process.stdout is not None
    assert first_word(process) == "word0 "  # streaming: it arrives long before the end
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 130
    assert out.startswith("word1 ") or out == "\n"
    assert out.endswith("\n")
    assert err == "\n"


def test_ctrl_c_while_loading(start: Start, fake_pronk: list[str]) -> None:
    process = start([*fake_pronk, "generate", "-m", "hang", "x"])
    assert process.stderr is not None
    assert process.stderr.readline() == "loading\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=240)
    assert (process.returncode, out, err) == (130, "", "\n")


@pytest.mark.parametrize("interrupted", [True, False])
def test_ctrl_c_while_a_library_imports_another(start: Start, tmp_path: Path, interrupted: bool) -> None:
    """ml_dtypes makes an ImportError of what ends its import of NumPy, as all do that use NumPy in C."""
    program = tmp_path / "importing.py"
    program.write_text(
        "import os, signal, pronk\nfrom pronk.cli import main\n"
        "def load(*a, **k):\n"
        "    try:\n"
        f"        if {interrupted}: os.kill(os.getpid(), signal.SIGINT)\n"
        "    except BaseException:\n        pass\n"
        "    raise ImportError('numpy._core.umath failed to import')\n"
        "vars(pronk)['load'] = load\nmain()\n"
    )
    process = start([sys.executable, str(program), "generate", "x"])
    err = process.communicate(timeout=240)[1]
    assert (process.returncode, err == "\n") == ((130, True) if interrupted else (1, False))


def test_ctrl_c_while_a_class_is_made(run: Run, loaded: list[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11 makes a RuntimeError of what ends the __set_name__ of a dataclass's field: it was shown as a bug."""

    def load(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("Error calling __set_name__ on 'Field' instance") from KeyboardInterrupt()

    monkeypatch.setattr("pronk.load", load)
    result = run("generate", "-m", "m", "Hi there")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "\n")


def test_ctrl_c_while_reading_standard_input(start: Start, fake_pronk: list[str]) -> None:
    process = start([*fake_pronk, "chat"])
    assert process.stdin is not None
    process.stdin.write("hello\n")
    process.stdin.flush()
    assert process.stdout is not None
    assert first_word(process) == "word0 "
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=240)
    assert process.returncode == 130


def test_a_second_ctrl_c_ends_even_what_swallows_the_first(start: Start, tmp_path: Path) -> None:
    """As `except:` in a library, or a destructor, does."""
    stubborn = tmp_path / "stubborn.py"
    stubborn.write_text(
        "import time, pronk\nfrom pronk.cli import main\n"
        "def load(*a, **k):\n"
        "    while True:\n"
        "        try:\n            print('working', flush=True); time.sleep(60)\n"
        "        except BaseException:\n            pass\n"
        "vars(pronk)['load'] = load\nmain()\n"
    )
    process = start([sys.executable, str(stubborn), "generate", "x"])
    assert process.stdout is not None
    for _ in range(2):
        assert process.stdout.readline() == "working\n"
        process.send_signal(signal.SIGINT)
    assert process.wait(timeout=240) == 130
    process.communicate()


@pytest.mark.skipif(os.name == "nt", reason="pipes of Windows tell otherwise")
def test_a_reader_that_leaves_is_no_error(start: Start, fake_pronk: list[str]) -> None:
    process = start([*fake_pronk, "generate", "slow", "-n", "50"])
    assert process.stdout is not None
    assert process.stderr is not None
    assert first_word(process) == "word0 "
    process.stdout.close()
    assert process.wait(timeout=240) == 0
    assert process.stderr.read() == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line(fake_pronk: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*fake_pronk, "generate", "x"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr == "pronk: No space left on device\n"


def test_python_m_pronk() -> None:
    done = subprocess.run([sys.executable, "-m", "pronk", "--version"], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"pronk {__version__}\n", "")


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")
def test_a_closed_standard_input_is_an_empty_prompt(fake_pronk: list[str]) -> None:
    command = ["sh", "-c", 'exec "$@" <&-', "sh", *fake_pronk, "generate", "-n", "1"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "word0 \n"


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")
@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_a_closed_output_is_no_traceback(fake_pronk: list[str], closed: str) -> None:
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", *fake_pronk, "generate", "-n", "1", "x"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == ("" if closed == ">&-" else "word0 \n")
    assert "Traceback" not in done.stderr


def test_a_bar_keeps_to_its_line_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(StringIO):
        encoding = "ascii"

        def isatty(self) -> bool:
            return True

    for columns, line in (
        (80, "loading " + "#" * 20 + "-" * 20 + " 500 B of 1.0 kB, 1 s left"),
        (40, "loading ##--- 500 B of 1.0 kB, 1 s left"),
        (20, "loading  500 B of 1"),
    ):
        screen = Screen()
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(sys, "stderr", screen)
        monkeypatch.setattr(progress, "_columns", lambda columns=columns: columns)
        with progress.shown("loading", patience=0) as advance:
            advance("", 500, 1000)
            advance("", 501, 1000)  # too soon to be drawn
            assert screen.getvalue() == f"\r{line}\x1b[K"
            advance("", 1000, 1000)
        assert screen.getvalue().endswith("\x1b[K\r\x1b[K")


def test_of_long_work_a_pipe_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of hours whose stderr is a file said nothing between two looks at held-out data."""
    pipe, now = StringIO(), [1000.0]
    monkeypatch.setattr(sys, "stderr", pipe)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.shown("training", lambda done, total: f"step {done} of {total}", logged=True) as advance:
        for step in range(101):  # 17 minutes
            advance("", step, 100)
            now[0] += 10
            if step == 49:
                advance("", 1, 1)  # a look at held-out data takes the bar away, and is no reason for a line
    said = pipe.getvalue().splitlines()
    assert said[:2] == ["training: step 3 of 100, 16 min left", "training: step 6 of 100, 16 min left"]
    assert len(said) == 33
    assert "\x1b" not in pipe.getvalue()
    with progress.shown("training", progress.of_tokens, 0, True, ends=now[0] + 60) as advance:  # as by --max-time
        advance("", 0, 100)
        now[0] += 31
        advance("", 1, 100)
    assert pipe.getvalue().endswith("training: 1 of 100 tokens, 29 s left\n")


def test_a_context_beyond_the_trained_one_is_noted(run: Run, loaded: list[FakeLLM], monkeypatch: Any) -> None:
    noted = "a context of 99 tokens is more than the 64 the model was trained for\n"
    monkeypatch.setattr(FakeLLM, "ctx_size", 99)
    assert run("generate", "x", "-c", "99", "-n", "1").stderr.startswith(noted)
    assert noted in run("chat", "-c", "99", input="").stderr
    stretched = SimpleNamespace(**vars(FakeLLM.config) | {"rope_scaling": SimpleNamespace(rope_type="dynamic")})
    monkeypatch.setattr(FakeLLM, "config", stretched)
    assert "a context of" not in run("generate", "x", "-c", "99", "-n", "1").stderr


def test_more_threads_than_processors_are_noted(run: Run, loaded: list[FakeLLM], monkeypatch: Any) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    noted = "3 threads on 2 processors: more than 2 are no faster\n"
    assert run("generate", "x", "--threads", "3", "-n", "1").stderr.startswith(noted)
    assert "no faster" not in run("generate", "x", "--threads", "2", "-n", "1").stderr


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")])
def test_memory_that_runs_out_is_said_in_a_line(
    run: Run, loaded: list[FakeLLM], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def stream(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(FakeLLM, "stream", stream)
    done = run("generate", "x")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("pronk: out of memory; fewer bits (--quantize)")
    error = RuntimeError("another mistake")  # of pronk's, whose traceback is wanted
    with pytest.raises(RuntimeError, match="another"):
        run("generate", "x")


@pytest.mark.parametrize(
    ("said", "shown"), [("No such thing.", "no such thing"), ("LoRA's rank", "LoRA's rank"), ("A rank", "a rank")]
)
def test_a_name_keeps_its_capital(said: str, shown: str) -> None:
    assert Misuse(click.UsageError(said)).message == shown


def test_a_prompt_without_quotes(run: Run, loaded: list[FakeLLM]) -> None:
    """Each word is a prompt of its own, which is said before they run; where there is one argument it is refused."""
    done = run("generate", "-n1", "Once", "upon")
    assert done.stderr.splitlines()[0] == "2 prompts of a word each; a prompt of several words goes in quotes"
    assert [call["prompt"] for call in loaded[0].calls] == ["Once", "upon"]
    said = "pronk: got unexpected extra argument (b); what has spaces goes in quotes\nTry 'pronk inspect --help'.\n"
    done = run("inspect", "a", "b")
    assert (done.exit_code, done.stderr) == (2, said)


@pytest.mark.parametrize("verb", ["serve", "chat"])
def test_a_model_without_its_option(run: Run, verb: str) -> None:
    """Many verbs take MODEL bare, these do not; quotes would not help."""
    done = run(verb, "smollm2:135m")
    said = "got unexpected extra argument (smollm2:135m); -m MODEL names the model"
    assert (done.exit_code, done.stderr.splitlines()[0]) == (2, f"pronk: {said}")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["serve", "--port", "abc"], "'--port': 'abc' is not a whole number"),
        (["serve", "--max-wait", "soon"], "'--max-wait': 'soon' is not a number"),
        (["generate", "--temperature", "hot", "a"], "'--temperature': 'hot' is not a number"),
        (["serve", "--adapters", "./none"], "./none: no such folder; --adapters wants one"),
        (["serve", "--allowed-origin", "example.org"], "--allowed-origin 'example.org' is no origin"),
        (["serve", "--allowed-origin", "https://example.org/"], "write it as https://example.org, with no path"),
        (["serve", "--allowed-host", "http://example.org/"], "write it as llm.example.org, with no port"),
        (["serve", "--allowed-host", "example.org:8000"], "write it as llm.example.org, with no port"),
        (["finetune", "smollm2:135m", "--steps", "2"], "no such option --steps; did you mean --max-steps?"),
    ],
)
def test_wrong_values_are_told_in_words(run: Run, arguments: list[str], problem: str) -> None:
    done = run(*arguments)
    assert done.exit_code != 0
    assert problem in done.stderr.splitlines()[0]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_told_to_end_it_takes_away_what_is_half_written(name: str, tmp_path: Path) -> None:
    """A terminal that was closed (SIGHUP) left it there, and the folders of workers that measured."""
    if not hasattr(signal, name):
        pytest.skip("a signal of POSIX")
    number = int(getattr(signal, name))
    script = """
import os, signal, sys
from pathlib import Path
from pronk import cli
from pronk import system
signal.signal(int(sys.argv[2]), signal.SIG_DFL)  # which who runs the tests may ignore, as nohup does
def half_done(prog_name):
    with system.replacing(Path(sys.argv[1])) as partial:
        partial.write_text("half of it")
        os.kill(os.getpid(), int(sys.argv[2]))
cli.group = half_done
cli.main()
"""
    command = [sys.executable, "-c", script, str(tmp_path / "model.gguf"), str(number)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("made with data=['a.jsonl', 'b.jsonl'], and now", "made with --data ['a.jsonl', 'b.jsonl'], and now"),
        ("made with data=['a.jsonl', 'b..., and now", "made with --data ['a.jsonl', 'b..., and now"),
        ("made with data='a.jsonl', and now", "made with --data a.jsonl, and now"),
    ],
)
def test_a_list_in_a_message_keeps_its_quotes(said: str, shown: str) -> None:
    """`--resume` with other files said: made with --data ['a.jsonl, 'b.jsonl']."""
    with click.Context(_command("finetune")) as ctx:
        typed.remember(ctx, {})
        assert typed.in_words(ctx, said)[0] == shown


def test_a_bracket_in_a_value_ends_no_tuple() -> None:
    """--stop 'x)y' with beams said: --stopy',) means nothing."""
    with click.Context(_command("generate")) as ctx:
        typed.remember(ctx, {})
        assert typed.in_words(ctx, "stop=('x)y', '(') means nothing")[0] == "--stop means nothing"


def test_an_adapter_to_serve_names_its_folder(run: Run) -> None:
    """`--adapter poet=` looked in the folder that one was in."""
    result = run("serve", "--adapter", "poet=")
    assert (result.exit_code, result.stderr.splitlines()[0]) == (
        2,
        "pronk: --adapter 'poet=' names no folder; write it as NAME=FOLDER",
    )
