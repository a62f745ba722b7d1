"""Conditions: what the figures were measured under; without them they mean nothing."""

from __future__ import annotations

import re
from typing import Any

from pronk.measure.figures import at
from pronk.measure.formatting import listed, name_of
from pronk.measure.report.tables import Own

_FIELD = r"(\{([\w.]+):?(\w*)\})"


def stated(report: Own, said: str) -> str:
    """`said` with what lies at its {paths} filled in, {path:1e6} in millions; a part (between dots) of which something
    is absent is left out."""
    return " · ".join(filter(None, (_part(report, part) for part in said.split(" · "))))


def with_conditions(report: Own) -> dict[str, Any]:
    """The report with what is to be put together of several of its fields."""
    variants, settings = report["variants"], report["settings"]
    perplexities = {name_of(v): found for v in variants if (found := at(v, "quality.perplexity"))}
    protocols = [of["protocol"] for of in perplexities.values() if of.get("protocol")]  # the same of all
    versions, digests = (at(report, f"provenance.{key}") or {} for key in ("versions", "model_sha256"))
    return {
        **report,
        "protocol": protocols[0] if protocols else None,
        "one_batch": [name for name, of in perplexities.items() if of.get("one_batch") is True],
        "generation": settings if settings.get("new_tokens") else None,
        "options": "; ".join(f"{name_of(v)}: {_options(v)}" for v in variants),
        "versions": " · ".join(f"{name} {version}" for name, version in sorted(versions.items()) if version),
        "sha256": " · ".join(f"{name} {digest}" for name, digest in sorted(digests.items())),
    }


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
