"""What one version of Python does otherwise than all others, and no test of ours runs under each of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp


def mixed_up(source: str) -> Iterator[str]:
    """Names that a comprehension binds and another one of the same function reads as the module's: Python 3.12, which
    runs comprehensions in the function's own frame, then finds the second unbound."""
    tree = ast.parse(source)
    of_module = {alias.asname or alias.name for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)
                 for alias in node.names}  # fmt: skip
    of_module |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    of_module |= {target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets
                  if isinstance(target, ast.Name)}  # fmt: skip
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        found = [node for node in ast.walk(function) if isinstance(node, Comprehension)]
        binds = [{name.id for part in one.generators for name in ast.walk(part.target) if isinstance(name, ast.Name)}
                 for one in found]  # fmt: skip
        reads = [{name.id for name in ast.walk(one) if isinstance(name, ast.Name)} for one in found]
        for name in set().union(*binds) & of_module:
            if any(name in names and name not in own for names, own in zip(reads, binds, strict=True)):
                yield f"line {function.lineno}: {function.name} binds and reads {name!r} in comprehensions"


def test_no_comprehension_takes_the_name_that_another_reads() -> None:
    """`pronk grpo --rollout exact` ended in an UnboundLocalError under Python 3.12."""
    for path in sorted((ROOT / "src").rglob("*.py")):
        assert not list(mixed_up(path.read_text("utf-8"))), path


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("a = [x for sample in range(3)]; return [sample(n) for n in a]", 1),
        ("a = [x for nth in range(3)]; return [sample(n) for n in a]", 0),
        ("a = [sample for sample in range(3)]; return sample(a)", 0),
    ],
)
def test_the_check_can_fail(body: str, found: int) -> None:
    assert len(list(mixed_up(f"from there import sample\n\ndef f(x):\n    {body}\n"))) == found
