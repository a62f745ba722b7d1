"""The pages' commands of pronk run as they stand there, on tiny models and data under the names that the pages use.

Not `--resume` of a run that is over by then, and not torchrun, which tests/train/test_distributed.py has.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from adapters import random_adapter, save
from click.testing import CliRunner
from scripts import script
from tiny_folder import save_tiny_chat_model

from pronk import checkpoint
from pronk.cli import group
from pronk.measure.windows import evaluation_text

ROOT = Path(__file__).resolve().parents[1]
SITE = script(ROOT / "docs" / "make_site.py")
MODEL = "smollm2:135m"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# What takes minutes on any model, made short; every option that a page shows is still given.
SHORT = {
    "compare": ["--rounds", "1", "--prefill", "8", "--decode-tokens", "2", "--windows", "1"],
    "finetune": ["--max-steps", "1", "--samples", "0"],
    "dpo": ["--max-steps", "1", "--samples", "0"],
    "kto": ["--max-steps", "1", "--samples", "0"],
    "reward": ["--max-steps", "1", "--samples", "0"],
    "grpo": ["--max-steps", "1", "--samples", "0", "--max-new-tokens", "4", "--accumulate", "1"],
    "pretrain": ["--max-steps", "1", "--samples", "0", "--hidden-size", "32", "--layers", "1"],
    "merge": ["--accept-loss"],  # a single step's adapter is finer than any rounding
    "serve": ["--port", "0"],
}
# What a page goes on with, that another one made.
ADAPTERS = {"docs/preferences.md": ["mine"], "docs/trained-adapters.md": ["mine", "alpaca"]}
SHORT_AFTER = {"--layer": ["--layer", "1", "--head", "1"]}  # the tiny model has no layer 16
NOT_RUN = {
    "docs/cli.md": "it is what --help prints, which a test of its own holds to the program",
    "CHANGELOG.md": "it tells what was",
}


def commands(page: str) -> list[str]:
    """Command lines of pronk's in a page's fences, with what is typed before a pipe."""
    found = []
    for language, block in FENCE.findall((ROOT / page).read_text(encoding="utf-8")):
        for line in (block if language in ("", "bash") else "").replace("\\\n", " ").splitlines():
            line = line.removeprefix("$ ").strip()
            if re.match(r"(printf .* \| |echo .* \| )?pronk [a-z]", line):
                found.append(line)
    return found


PAGES = sorted(page for page in SITE.pages() if page not in NOT_RUN and commands(page))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("pages") / "tiny")


@pytest.fixture
def there(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the pages name."""
    from pronk.checkpoint.hub import resolve

    real = resolve.resolve

    def instead(name: str | Path, **options: Any) -> Path:
        return tmp_path / "tiny" if str(name) == MODEL else real(name, **options)

    monkeypatch.setattr(resolve, "resolve", instead)  # for commands that name no model
    for name in ("tiny", "my-model", "one", "two"):
        shutil.copytree(tiny, tmp_path / name)
    poet = random_adapter(checkpoint.open(tiny).config, uneven=False)
    for name in ("poet", "lawyer", "all-my-adapters/poet"):
        save(tmp_path / name, poet)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PRONK_HOME", str(tmp_path / "home"))
    records = [{"prompt": f"Say {n}.", "completion": f"{n}!"} for n in range(6)]
    liked = [{**record, "chosen": "yes", "rejected": "no"} for record in records]
    for name in ("mine.jsonl", "pirate.jsonl", "alpaca_data_200.json"):
        Path(name).write_text("\n".join(map(json.dumps, records)) + "\n")
    Path("preferences.jsonl").write_text(
        "\n".join(json.dumps({k: v for k, v in r.items() if k != "completion"}) for r in liked)
    )
    Path("judged.jsonl").write_text("\n".join(json.dumps({**r, "label": True}) for r in records))
    Path("prompts.jsonl").write_text("\n".join(json.dumps({"prompt": r["prompt"]}) for r in records))
    Path("person.json").write_text('{"type": "object", "properties": {"age": {"type": "integer"}}}')
    Path("keys.txt").write_text("a-key\n")
    Path("on.jinja").write_text("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    Path("sums.lark").write_text('start: /[0-9]/ ("+" /[0-9]/)*')
    for name in ("stories.txt", "wikitext-2/test.txt"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(evaluation_text(), encoding="utf-8")
    return tmp_path


def typed(line: str) -> tuple[list[str], str | None]:
    """Arguments, and what comes through a pipe."""
    before, piped, after = line.rpartition(" | pronk ")
    said = None
    if piped:
        _, text = shlex.split(before)
        said = text.encode().decode("unicode_escape")
    arguments = shlex.split(after.removeprefix("pronk ").replace("$'\\n'", "'\n'"), comments=True)
    return arguments, said


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Addresses of servers, each of which was found well, then told to end."""
    from pronk.serve import run as serving

    addresses: list[str] = []
    really = serving.run

    def briefly(models: Any, bound: Any, **options: Any) -> None:
        made: list[serving.Uvicorn] = []
        listening = threading.Event()

        def ready(address: str) -> None:
            addresses.append(address)
            listening.set()

        def end_it() -> None:
            assert listening.wait(60)
            with urllib.request.urlopen(f"{addresses[-1]}/health") as answer:
                assert answer.status == 200
            made[0].should_exit = True

        asking = threading.Thread(target=end_it)
        asking.start()
        really(models, bound, **{**options, "ready": ready, "made": made.append})
        asking.join()

    monkeypatch.setattr(serving, "run", briefly)
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    yield addresses
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before  # which are not the server's


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_commands_run(page: str, there: Path, served: list[str]) -> None:
    for name in ADAPTERS.get(page, []):
        shutil.copytree(there / "poet", there / name)
    for line in commands(page):
        arguments, said = typed(line)
        if "--resume" in arguments and arguments[0] != "compare":
            continue  # the run is over by then: SHORT ended it
        arguments = [str(there / "tiny") if word in ("MODEL", MODEL) else word for word in arguments]
        arguments[1:1] = SHORT.get(arguments[0], [])
        arguments += [word for option, instead in SHORT_AFTER.items() if option in arguments for word in instead]
        ran = CliRunner().invoke(group, arguments, input=said, prog_name="pronk")
        assert ran.exit_code == 0, f"{page}: {line}: {ran.stderr[-400:]}"
    assert len(served) == sum("pronk serve" in line for line in commands(page))


def test_a_command_that_fails_is_found() -> None:
    assert typed("printf 'a\\nb\\n' | pronk chat -n 2") == (["chat", "-n", "2"], "a\nb\n")
    assert CliRunner().invoke(group, ["generate", "--no-such-option"]).exit_code == 2
