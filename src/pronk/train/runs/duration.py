"""Durations as people write them: 90m, 2h, 1h30m, 1d, or a number of seconds."""

from __future__ import annotations

import math
import re

_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_NUMBER = r"\d{1,12}(?:\.\d{1,12})?"
_FORM = re.compile("".join(rf"(?:(?P<{unit}>{_NUMBER}){unit})?" for unit in _UNITS), re.ASCII | re.IGNORECASE)
_MOST = 1e10  # seconds: some 300 years


def seconds(said: str | float) -> float:
    """Raises ValueError for what is no duration over 0."""
    if isinstance(said, bool):
        raise ValueError(said)
    if isinstance(said, str):
        parts = _FORM.fullmatch("".join(said.split()))
        if parts and parts[0]:
            found = sum(float(part) * _UNITS[unit] for unit, part in parts.groupdict().items() if part)
        elif re.fullmatch(_NUMBER, said.strip(), re.ASCII):
            found = float(said)
        else:
            raise ValueError(said)
    else:
        found = float(said)
    if not (math.isfinite(found) and 0 < found <= _MOST):
        raise ValueError(said)
    return found
