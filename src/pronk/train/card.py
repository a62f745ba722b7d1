"""README.md of a run's folder, which says what was trained: base, data, settings, losses, time and memory, and how to
use it. Its beginning is the YAML that Hugging Face's hub reads (https://huggingface.co/docs/hub/model-cards).

Of paths it says the last name alone: where somebody's files lie is nobody's business.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pronk.checkpoint.hub.known import repository_of
from pronk.checkpoint.hub.local import public
from pronk.errors import one_line
from pronk.system import replacing
from pronk.train.folder import CHECKPOINTS, MODEL, read_metrics
from pronk.train.saved_settings import NEW_MODEL, flat

if TYPE_CHECKING:
    from pronk.train.data.sources import Data
    from pronk.train.settings import Settings

CARD = "README.md"
_MARK = "<!-- Written by pronk"
_MOST_LOOKS = 20  # rows of the table of losses


def write(folder: Path, found: Mapping[str, Any], settings: Settings, data: Data) -> str | None:
    """`found`: a Result's dict. None, or why there is none: a page that pronk did not write, or that was changed since,
    stays. Raises OSError."""
    path = folder / CARD
    if path.exists() and not ours(path.read_bytes()):
        return f"{path} is not pronk's, and stays as it is: nothing was written of this run"
    front, text = _front(found, settings), _text(folder, found, settings, data)
    with replacing(path) as fresh:
        fresh.write_bytes((front + _mark(text) + text).encode())
    return None


def ours(page: bytes) -> bool:
    """Whether it is as pronk wrote it, but for its YAML, which is nobody's prose."""
    text = page.decode(errors="replace")
    begin = text.find(_MARK)
    if begin < 0:
        return False
    line, _, rest = text[begin:].partition("\n")
    return line + "\n" == _mark(rest)


def _mark(text: str) -> str:
    digest = sha256(text.encode(errors="replace")).hexdigest()[:16]
    return f"{_MARK}, {digest}: a later run replaces this page unless it was changed. -->\n"


def _front(found: Mapping[str, Any], settings: Settings) -> str:
    objective = str(flat(settings)["objective"])
    reward = objective == "reward"
    told: dict[str, Any] = {"library_name": "peft" if settings.lora else "transformers"}
    if base := _on_hub(settings.model):
        told["base_model"] = base
        told["base_model_relation"] = "adapter" if settings.lora else "finetune"
    told["pipeline_tag"] = "text-classification" if reward else "text-generation"
    told["tags"] = ["pronk", objective, *(["lora"] if settings.lora else []), "llama"]
    lines = [f"{key}: {json.dumps(value)}\n" for key, value in told.items()]  # which is YAML as well
    return "---\n" + "".join(lines) + "---\n\n"


def _text(folder: Path, found: Mapping[str, Any], settings: Settings, data: Data) -> str:
    told = flat(settings)
    base, objective = public(settings.model), str(told["objective"])
    planned = "" if found["finished"] else f" of {found['planned_steps']}: stopped, and --resume goes on"
    parts = [
        f"# {one_line(folder.resolve().name, 100)}\n",
        f"{found['method']}, {found['trained_share']:.2%} of the parameters of {_code(base)}; objective "
        f"{_code(objective)}.\n",
        "## Use\n\n" + _use(folder, found, base, settings, objective),
        "## Data\n\n" + _table([("data", ""), ("from", _listed(settings.sources)), *_of_data(settings, data)]),
        "## Rewards\n\n" + _losses(folder, found, "reward")
        if found.get("reward")
        else "## Losses\n\n" + _losses(folder, found, "loss"),
        "## Cost\n\n" + _table([
            ("cost", ""),
            ("steps", f"{found['steps']}{planned}, {found['epochs']:.2f} epochs"),
            ("time", f"{found['seconds']:.4g} s of steps, {found['tokens_a_second']:.0f} tokens/s"),
            ("peak memory", f"{found['peak_bytes'] / 1e9:.2f} GB"),
        ]),
        "## Settings\n\n" + _table([
            ("setting", "value"),
            *((_code(key), _code(value)) for key, value in sorted(_settings(told))),
        ]),
    ]  # fmt: skip
    return "\n".join(parts)


def _on_hub(name: str) -> str | None:
    """The repository that a model's name stands for: owner/name, which is no path."""
    if name.count("/") == 1 and public(name) == name and not name.startswith(NEW_MODEL) and ":" not in name:
        return name
    return repository_of(name)


def _use(folder: Path, found: Mapping[str, Any], base: str, settings: Settings, objective: str) -> str:
    own = one_line(folder.resolve().name, 100)
    made = found["adapter"] or found["model_folder"]
    if made is None:
        return "The run was stopped before there was a model to be used; --resume goes on with it.\n"
    if settings.lora and (newest := Path(made)).parent.name == CHECKPOINTS:  # stopped before there was a best
        own = f"{own}/{CHECKPOINTS}/{newest.name}"
    if not settings.lora:
        verb = "score" if objective == "reward" else "generate"
        question = "TEXT" if objective == "reward" else '"Once upon a time"'
        return f"```sh\npronk {verb} {'' if verb == 'score' else '-m '}{own}/{MODEL} {question}\n```\n"
    merged = " --merge-adapter" if settings.lora.dora else ""
    if objective == "reward":
        return f"```sh\npronk score {base} --adapter {own}{merged} TEXT\n```\n"
    converted = (
        "" if settings.lora.dora else f"pronk convert {own} {own}.gguf --base {base}    # for llama.cpp's --lora\n"
    )
    of = f", with {repository} as the base" if (repository := _on_hub(settings.model)) else ""
    return (
        f'```sh\npronk generate -m {base} --adapter {own}{merged} "Once upon a time"\n'
        f"pronk merge {base} {own} merged                 # one model of both\n"
        f"{converted}```\n\n"
        f"PEFT reads it as well: `PeftModel.from_pretrained(base, FOLDER)`{of}.\n"
    )


def _of_data(settings: Settings, data: Data) -> Iterator[tuple[str, str]]:
    for name, (there, seen) in data.mixture.items():
        yield _code(public(name)), str(there) + (f", of which an epoch has {seen}" if seen != there else "")
    yield "examples", str(len(data.train))
    held_out = str(len(data.held_out))
    yield "held out", held_out + (f", of {_code(public(settings.eval_data))}" if settings.eval_data else "")
    counts = {
        "malformed, left out": len(data.skipped),
        "cut at their end": data.cut,
        "too long, left out": data.too_long,
        "exact copies of another": data.duplicates,
    }
    yield from ((what, str(count)) for what, count in counts.items() if count)


def _losses(folder: Path, found: Mapping[str, Any], which: str) -> str:
    """Losses or rewards at the looks at held-out data, beside the mean of the steps since the look before; without
    looks, the ends."""
    rows, since = [("step", f"training {which}", f"held-out {which}")], list[float]()
    for line in read_metrics(folder):
        if which in line:
            since.append(line[which])
        if f"held_out_{which}" in line:
            mean = f"{sum(since) / len(since):.4f}" if since else ""
            rows.append((str(line["step"]), mean, f"{line[f'held_out_{which}']:.4f}"))
            since = []
    kept = found["held_out_loss"]
    if len(rows) > 1:
        more = len(rows) - 1 - _MOST_LOOKS
        told = _table([rows[0], *rows[1:][-_MOST_LOOKS:]])
        told += f"\nThe last {_MOST_LOOKS} of {len(rows) - 1} looks.\n" if more > 0 else ""
        if kept:
            judged = found.get("held_out_task")  # by what else than its loss
            worse = ", which is worse than at step 0" if not judged and kept["kept"] > kept["first"] else ""
            told += f"\nKept is what it was at step {kept['kept_step']}{worse}.\n"
        return told
    ends, steps = found[which], found["loss"]["steps"]
    of = f"means of the first and last {steps} steps" if steps > 1 else "of the first and the last step"
    return f"{ends['first']:.4f} and {ends['last']:.4f}: {of}.\n"


def _settings(told: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in told.items():
        if value is None or value == [] or key in ("model", "data"):
            continue
        if isinstance(value, str):
            yield key, public(value)
        elif isinstance(value, list):
            yield key, ", ".join(public(one) if isinstance(one, str) else json.dumps(one) for one in value)
        else:
            yield key, json.dumps(value)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(_code(public(name)) for name in names)


def _table(rows: Iterable[Sequence[str]]) -> str:
    """Its first row is its head."""
    lines = [f"| {' | '.join(row)} |\n" for row in rows]
    return lines[0] + "|" + "---|" * lines[0].count(" | ") + "---|\n" + "".join(lines[1:])


def _code(text: str) -> str:
    """As it is, in a cell of a table."""
    return "`" + one_line(text, 200).replace("`", "'").replace("|", "/") + "`"
