"""Tasks: a model's scores on benchmarks, as lm-evaluation-harness asks and counts them, question by question.

Three tasks come with pronk (benchmarks/), with their questions; a task file of one's own, or any task that the harness
knows, runs as well, the latter where its data is on disk or the network is there. Two models answer the same questions,
so what tells them apart is the difference question by question, which is far less uncertain than the two scores are.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from pronk.checkpoint.tensors import Progress
from pronk.errors import BadRequest
from pronk.llm import LLM
from pronk.measure.lm_eval import register
from pronk.measure.noise import mean

FOLDER = Path(__file__).with_name("benchmarks")
OWN = tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def check(names: Sequence[str]) -> None:
    """Raises BadRequest for a task that there is not, and PronkError where there is no harness."""
    register()
    with _quiet():
        _found(names)


def evaluate(
    llm: LLM, names: Sequence[str], *, limit: int | None = None, progress: Progress | None = None
) -> dict[str, dict[str, Any]]:
    """Scores by task; a group of tasks gives its members. `names`: of tasks, or files that hold one. `limit`: questions
    of each, at most.

    Tasks that ask for text go through the model's chat template, if it brings one. For each task: "chat", whether that
    was so; "questions", how many; "metrics" {name: {"value"; "better": "higher" or "lower"; "scores", a number a
    question whose mean the value is, and "standard_error" of that mean, both None where the value is no mean}}.
    """
    model = register()(llm)
    model.progress = progress
    templated = llm.tokenizer.chat_template is not None
    found: dict[str, dict[str, Any]] = {}
    with _quiet():
        manager, tasks = _found(names)
        writing = [name for name in tasks if templated and _writes(manager, name)]
        for chat, few in ((False, [name for name in tasks if name not in writing]), (True, writing)):
            if few:
                made = import_module("lm_eval").simple_evaluate(
                    model, tasks=few, limit=limit, apply_chat_template=chat, task_manager=manager, bootstrap_iters=0
                )
                for task, samples in made["samples"].items():
                    better = made["higher_is_better"][task]
                    metrics = _metrics(made["results"][task], samples, better)
                    found[task] = {"chat": chat, "questions": len(samples), "metrics": metrics}
    return found


def paired(original: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of one metric of two models: the mean "difference" of their scores, and its "standard_error".

    None where the values are no means, or the questions are others.
    """
    before, after = original["scores"], own["scores"]
    if before is None or after is None or len(before) != len(after):
        return None
    change = mean([own - base for own, base in zip(after, before, strict=True)])
    return {"difference": change.value, "standard_error": change.error}


def _metrics(
    results: Mapping[str, Any], samples: Sequence[Mapping[str, Any]], better: Mapping[str, bool | None]
) -> dict[str, Any]:
    metrics = {}
    for name in samples[0]["metrics"]:
        value = next(float(result) for key, result in results.items() if key.partition(",")[0] == name)
        each = [sample[name] for sample in samples]
        scores = [float(one) for one in each] if all(isinstance(one, int | float) for one in each) else None
        if scores and not math.isclose(mean(scores).value, value, rel_tol=1e-9, abs_tol=1e-12):
            scores = None
        metrics[name] = {
            "value": value,
            "better": "higher" if better.get(name, True) else "lower",
            "scores": scores,
            "standard_error": mean(scores).error if scores else None,
        }
    return metrics


def _found(names: Sequence[str]) -> tuple[Any, list[str]]:
    """The harness's own manager, and what it calls the tasks."""
    files = [Path(name) for name in names if name.endswith((".yaml", ".yml"))]
    if missing := [file for file in files if not file.is_file()]:
        raise BadRequest(f"no task file at {missing[0]}")
    held = {str(file): _task_of(file) for file in files}
    tasks = [held.get(str(Path(name)), name) for name in names]
    folders = dict.fromkeys([str(FOLDER), *(str(file.parent) for file in files)])
    others = set(tasks) - {*OWN, *held.values()}  # to look through all of the harness's takes seconds
    manager = import_module("lm_eval.tasks").TaskManager(include_path=list(folders), include_defaults=bool(others))
    if unknown := [task for task in tasks if task not in manager.all_tasks]:
        raise BadRequest(
            f"there is no task {unknown[0]!r}; give a task file, the name of one of lm-evaluation-harness's, or "
            f"{', '.join(OWN)}"
        )
    return manager, list(dict.fromkeys(tasks))


def _task_of(file: Path) -> str:
    """What a task file calls its task. Raises BadRequest."""
    found = re.search(r"^task: *[\"']?([\w.-]+)", file.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    if not found:
        raise BadRequest(f"{file}: no task file of lm-evaluation-harness, for it has no line `task: NAME`")
    return found[1]


def _writes(manager: Any, name: str) -> bool:
    tasks = [import_module("lm_eval.tasks").get_task_dict([name], manager)]
    while tasks:
        task = tasks.pop()
        if isinstance(task, dict):
            tasks.extend(task.values())
        elif task.OUTPUT_TYPE == "generate_until":
            return True
    return False


@contextmanager
def _quiet() -> Iterator[None]:
    """The harness tells much; of that, what pronk itself has to say stays."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    logging.getLogger("lm_eval.pronk").setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
