"""Which engine runs a model: the one asked for, or the one that the options or the machine call for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pronk import cpu_engine, torch_engine
from pronk.engine.declaration import Engine
from pronk.errors import BadRequest, short

# In the order in which they are taken where several would do.
ENGINES: tuple[Engine, ...] = (cpu_engine.ENGINE, torch_engine.ENGINE)
NAMES = tuple(engine.name for engine in ENGINES)
OPTIONS = tuple(dict.fromkeys(name for engine in ENGINES for name in engine.options))  # of pronk.load, of some alone
FORMATS = tuple(dict.fromkeys(format for engine in ENGINES for format in engine.formats))


def named(name: str) -> Engine:
    """Raises BadRequest."""
    for engine in ENGINES:
        if engine.name == name:
            return engine
    raise BadRequest(f"engine must be {' or '.join(NAMES)}, not {name!r}")


def choose(name: str | None, options: Mapping[str, Any]) -> str:
    """The name of one that has `options`, by name and None where not given. Raises BadRequest where none does, or the
    one that was asked for does not.
    """
    lacking = {engine: _lacking(engine, options) for engine in ENGINES}
    if name is not None:
        if wrong := lacking[named(name)]:
            others = [f"engine={engine.name!r}" for engine in ENGINES if wrong[0] not in lacking[engine]]
            raise BadRequest(f"{wrong[0]} is not for the {name} engine; leave it out, or take {' or '.join(others)}")
        return name
    fitting = [engine for engine in ENGINES if not lacking[engine]]
    if not fitting:
        one = lacking[ENGINES[-1]][0]
        whose = next(engine for engine in ENGINES if one not in lacking[engine])
        other = lacking[whose][0]
        its = next(engine for engine in ENGINES if other not in lacking[engine])
        raise BadRequest(f"{one} is for the {whose.title} and {other} for the {its.title}; leave one out")
    on_gpu = (engine for engine in fitting if options["device"] is None and engine.has_gpu())
    return next(on_gpu, fitting[0]).name


def options_for(engine: Engine, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `options` that the engine is to be given."""
    return {name: options[name] for name in ("quantize", *engine.options) if options.get(name) is not None}


def _lacking(engine: Engine, options: Mapping[str, Any]) -> list[str]:
    """What is asked for that another engine has and this one has not."""
    wanted = options["quantize"]
    asked = [name for name in OPTIONS if options[name] is not None and name not in engine.options]
    if options["device"] in engine.devices:
        asked = [name for name in asked if name != "device"]
    found = [f"{name}={short(options[name])}" for name in asked]
    if isinstance(wanted, Mapping):
        return found if engine.mixes else [*found, "quantize for single tensors"]
    return [*found, f"quantize={short(wanted)}"] if wanted in FORMATS and wanted not in engine.formats else found
