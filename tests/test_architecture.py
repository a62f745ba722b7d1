"""The house rules of docs/architecture.md, read off the source: who imports whom, and what importing costs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from pronk import cli

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src" / "pronk"

# The first prefix that matches a module gives its floor. A module imports its own floor's room, and floors below.
FLOORS = [
    (0, ("errors", "system", "strict_json", "spellings", "terminal")),
    (1, ("config", "formats", "drawing", "limited")),
    (1, ("tokenizer.files", "tokenizer.counted_json", "tokenizer.source", "tokenizer.vocabulary")),
    (4, ("engine.scheduler", "look")),
    (2, ("checkpoint", "tokenizer", "engine")),
    (3, ("torch_engine", "cpu_engine", "grammar", "calibrate")),
    (5, ("session",)),
    (8, ("train.runs",)),
    (6, ("prompts", "engines", "llm", "loading", "train")),
    (7, ("measure", "serve")),
    (9, ("cli",)),
    (10, ("__main__", "")),  # pronk/__init__.py: lazy public names, imported by nobody inside
]
MOST_AT_THE_ROOT = 12
HEAVY = {"torch", "transformers", "gguf", "safetensors"}


@cache
def modules() -> dict[str, Path]:
    names = {}
    for path in SRC.rglob("*.py"):
        parts = path.relative_to(SRC).with_suffix("").parts
        names[".".join(p for p in parts if p != "__init__")] = path
    return names


def floor(module: str) -> int:
    return next(f for f, rooms in FLOORS if any(module == r or module.startswith(r + ".") or not r for r in rooms))


def room(module: str) -> str:
    """The folder it lies in; single files of one floor share a room."""
    name = module.split(".")[0]
    return name if (SRC / name).is_dir() else f"floor {floor(module)}"


@cache
def imports(path: Path, *, at_module_level: bool = False) -> set[str]:
    """Every module named in an import; those under TYPE_CHECKING are left out."""
    tree = ast.parse(path.read_text())
    skipped = {
        node
        for test in ast.walk(tree)
        if isinstance(test, ast.If) and "TYPE_CHECKING" in ast.unparse(test.test)
        for node in ast.walk(test)
    }
    nodes = tree.body if at_module_level else ast.walk(tree)
    found: set[str] = set()
    for node in nodes:
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            # A folder that modules are imported from is not used itself.
            found |= names if names <= {f"pronk.{name}" for name in modules()} else {node.module, *names}
    return found


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_go_down(module: str) -> None:
    known = modules()
    for name in imports(known[module]):
        target = name.removeprefix("pronk.") if name.startswith("pronk.") else None
        if target is None or target not in known:
            continue
        same_room = room(target) == room(module) and floor(target) <= floor(module)
        assert same_room or floor(target) < floor(module), f"{module} (floor {floor(module)}) imports {target}"


def test_no_verb_imports_another_verb() -> None:
    verbs = {f"cli.{module}" for module in cli.VERBS.values()}
    for verb in verbs:
        named = {name.removeprefix("pronk.") for name in imports(modules()[verb])}
        assert not named & (verbs - {verb}), verb


@pytest.mark.parametrize("module", sorted(modules()))
def test_torch_stays_in_its_engine(module: str) -> None:
    heavy = {name.split(".")[0] for name in imports(modules()[module])} & HEAVY
    assert not heavy - ({"torch"} if room(module) in ("torch_engine", "train") else set())


def test_the_rules_can_be_broken(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    import torch.nn\n    from pronk.llm import load\n")
    assert {"torch.nn", "pronk.llm"} <= imports(bad)
    assert floor("checkpoint.readers.gguf") < floor("torch_engine.model") < floor("engine.scheduler") < floor("llm")


@pytest.mark.parametrize("module", sorted(modules()))
def test_every_module_says_what_it_is_for_in_its_first_line(module: str) -> None:
    path = modules()[module]
    said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert said or path.stat().st_size == 0, f"{module} has no docstring"


NOT_YET = {"cli/NAME.py", "train/objectives/NAME.py"}


def test_files_that_the_architecture_names_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    changes = page[page.index("## To change something") : page.index("## Decisions: files")]
    named = set(re.findall(r"`((?:[\w-]+/)*[\w-]+\.(?:py|cpp|h|jinja)|(?:\w+/)+)`", page))
    assert (
        len(re.findall(r"^\| (?!to add|---)", changes, re.MULTILINE)) >= 10
    )  # what is told, and held to the truth here
    places = [ROOT, SRC, SRC / "checkpoint", SRC / "measure", SRC / "train", ROOT / "src" / "native", ROOT / "tests"]
    files = {
        path.name for path in (*SRC.rglob("*.*"), *(ROOT / "tests").rglob("*.py"), *(ROOT / "src/native").iterdir())
    }
    lost = {name for name in named if not any((place / name).exists() for place in places) and name not in files}
    assert lost - NOT_YET == set()


def test_the_architecture_is_read_in_one_go() -> None:
    assert len((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines()) <= 250


def test_the_root_stays_small() -> None:
    assert len(list(SRC.glob("*.py"))) <= MOST_AT_THE_ROOT


def test_importing_pronk_loads_next_to_nothing() -> None:
    script = "import sys, pronk; print(*{'torch', 'numpy', 'tokenizers', 'tqdm', 'jinja2'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


def test_everything_but_the_engine_loads_without_torch() -> None:
    names = [f"pronk.{m}".rstrip(".") for m in modules() if room(m) not in ("torch_engine", "train", "__main__")]
    script = "import sys; sys.modules['torch'] = None\nfor m in sys.argv[1:]: __import__(m)"
    subprocess.run([sys.executable, "-c", script, *names], check=True)


def test_what_wheels_are_tested_with_is_installed_beside_them() -> None:
    """Their tests imported torch and gguf, which no wheel's environment has unless cibuildwheel is told."""
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    told = re.search(r"^test-requires = (.*)", settings, re.MULTILINE)
    command = re.search(r'^test-command = "pytest (.*)"', settings, re.MULTILINE)
    assert told
    assert command
    helpers = {path.stem: path for path in (ROOT / "tests").glob("*.py")}
    todo = [helpers.pop("conftest"), *(path for folder in command[1].split() for path in (ROOT / folder).glob("*.py"))]
    found: set[str] = set()
    while todo:
        names = imports(todo.pop(), at_module_level=True)
        found |= names
        todo += [helpers.pop(name) for name in names & helpers.keys()]
    assert "pronk.cpu_engine.backend" in found
    absent = {library for library in HEAVY if library not in told[1]}
    assert not absent & {name.split(".")[0] for name in found}
    assert not {name for name in found if name.startswith(("pronk.torch_engine", "pronk.train"))}
