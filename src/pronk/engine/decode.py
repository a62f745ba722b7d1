"""Run prompts to their ends: the smallest driver of a Scheduler."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from pronk.engine.backend import Backend
from pronk.engine.params import SamplingParams
from pronk.engine.rng import effective_seed
from pronk.engine.scheduler import Event, Scheduler
from pronk.errors import BadRequest


def generate(
    backend: Backend,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    eos_ids: Collection[int] = (),
    seeds: int | Sequence[int] | None = None,
    cached: bool = True,
    **limits: int,
) -> Iterator[Event]:
    """Events of all prompts as they come; `Event.request` is the prompt's index. `limits` are the Scheduler's.

    `params` and `seeds` are one for all or one each. Seeds not given are the params' own, or drawn; a caller that must
    report them draws them itself (rng.effective_seed). Raises what Scheduler.add does, before the first event.
    """
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    if seeds is None:
        seeds = [effective_seed(p.seed) for p in each]
    seeds = [seeds] * len(prompts) if isinstance(seeds, int) else list(seeds)
    if not len(prompts) == len(each) == len(seeds):
        raise BadRequest(f"{len(prompts)} prompts, {len(each)} params and {len(seeds)} seeds do not go together")
    scheduler = Scheduler(backend, cached=cached, **limits)
    for prompt, p, seed in zip(prompts, each, seeds, strict=True):
        scheduler.add(prompt, p, seed, eos_ids)
    return _drain(scheduler)


def _drain(scheduler: Scheduler) -> Iterator[Event]:
    with scheduler:
        while scheduler.has_work:
            yield from scheduler.step()
