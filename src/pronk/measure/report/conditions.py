"""Conditions: what the figures were measured under; without them they mean nothing."""

from __future__ import annotations

import re
from typing import Any

from pronk.measure.figures import at
from pronk.measure.formatting import listed, plain
from pronk.measure.report.tables import Own, name_of

# Paths of what stands there, with what it is divided by. Where nothing does, the part around it (between dots) is left
# out, and a condition without parts is none.
_FACTS = {
    "Model": "{model.name} · {model.format} · {model.quantization} · {model.parameters:1e6} million parameters · "
             "{model.stored_bytes:1e6} MB stored",
    "File": "{model.path}",
    "Processor": "{machine.cpu} · {machine.cores} cores · {machine.isa}",
    "Threads": "{machine.threads}",
    "Memory": "{machine.memory_bytes:1e9} GB",
    "System": "{machine.system} · Python {machine.python}",
    "Load before": "{machine.load}",
    "Rounds": "{settings.rounds}",
    "Prompts": "{settings.prefill} tokens",
    "Decode": "{settings.decode.tokens} tokens after {settings.decode.contexts}",
    "Text": "{settings.text} · {settings.windows} windows of {settings.window_tokens} tokens",
    "Text's tokens": "{settings.text_tokens} · SHA-256 {settings.text_sha256}",
    "Protocol": "{protocol} · for {one_batch} each window is one batch, whose tokens share scales",
    "Generation": "{generation.prompts} prompts · {generation.new_tokens} new tokens · seed {generation.seed}",
    "Reference": "{settings.reference}",
    "Variants": "{options}",
    "pronk": "{pronk} · commit {provenance.commit}",
    "Versions": "{versions}",
    "SHA-256": "{sha256}",
    "Made": "{made}",
    "Command": "{command}",
}  # fmt: skip
_FIELD = r"(\{([\w.]+):?(\w*)\})"


def conditions(report: Own) -> list[tuple[str, str]]:
    variants = report["variants"]
    perplexities = [(name_of(v), found) for v in variants if (found := at(v, "quality.perplexity"))]
    versions, digests = (at(report, f"provenance.{key}") or {} for key in ("versions", "model_sha256"))
    known = {
        **report,
        "protocol": next((of["protocol"] for _, of in perplexities if of.get("protocol")), None),  # of all the same
        "one_batch": [name for name, of in perplexities if of.get("one_batch") is True],
        "generation": report["settings"] if at(report, "settings.new_tokens") else None,
        "options": "; ".join(f"{name_of(v)}: {_options(v)}" for v in variants),
        "versions": " · ".join(f"{name} {version}" for name, version in sorted(versions.items()) if version),
        "sha256": " · ".join(f"{name} {digest}" for name, digest in sorted(digests.items())),
    }
    found = ((key, " · ".join(filter(None, (_part(known, part) for part in said.split(" · ")))))
             for key, said in _FACTS.items())  # fmt: skip
    return [(key, plain(said, 500)) for key, said in found if said]


def _part(known: Own, part: str) -> str:
    """Filled in; empty where anything of it is absent."""
    values = {whole: _said(at(known, path), divided) for whole, path, divided in re.findall(_FIELD, part)}
    return re.sub(_FIELD, lambda field: values[field[0]], part) if all(values.values()) else ""


def _said(found: Any, divided: str) -> str:
    """As text: with its unit taken out of it, and many of them in a row."""
    if found is None or isinstance(found, str):
        return found or ""
    if isinstance(found, list):
        return listed([_said(one, divided) for one in found])
    if divided:
        return f"{found / float(divided):,.1f}"
    return f"{found:,}" if abs(found) >= 10_000 else f"{found}"


def _options(variant: Own) -> str:
    return ", ".join(f"{key} {value}" for key, value in variant["options"].items() if value is not None) or "as stored"
