"""Shapes: what answers hold, as /openapi.json describes them. Answers are made as dicts; tests hold them to these."""

from __future__ import annotations
