"""The next pass is begun before anybody asks for it, and nobody can tell but by the clock.

That it changes no bit, whatever comes between two passes, is src/native/test_step.cpp's to show.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import in_memory, random_weights, tiny_config

from pronk.cpu_engine.backend import CpuBackend
from pronk.cpu_engine.kv import CpuKV
from pronk.engine.batch import Batch, Run
from pronk.engine.params import SamplingParams
from pronk.engine.scheduler import Scheduler
from pronk.llm import LLM

CONFIG = tiny_config(vocab_size=1100, num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=1024)
BLOCK = 64


@cache
def engine(threads: int) -> CpuBackend:
    return CpuBackend.from_checkpoint(in_memory(CONFIG, random_weights(CONFIG)), quantize="q8", threads=threads)


def llm(threads: int) -> LLM:
    return LLM("tiny", in_memory(CONFIG, random_weights(CONFIG)), None, engine(threads))


def prompt(n: int) -> list[int]:
    return np.random.default_rng(n).integers(0, CONFIG.vocab_size, 2 + 37 * n % 90).tolist()


def decoding(backend: CpuBackend, kv: CpuKV, passes: int, position: int = 0) -> Iterator[np.ndarray]:
    """The logits of passes that each go on with the likeliest token."""
    token = 1
    for at in range(position, position + passes):
        logits = backend.forward(Batch.of([Run([token], at, range(kv.num_blocks))]), kv)
        token = int(logits.argmax())
        yield logits


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_texts_beside_each_other_are_those_of_one_thread(data: Any) -> None:
    """One thread begins nothing: what it gives is what there is without all this."""
    params = st.builds(
        lambda sampling, **more: SamplingParams(**sampling, **more, ignore_eos=True),
        st.sampled_from([{}, {}, {"temperature": 0.3}, {"temperature": 0.3, "n": 2}]),
        max_new_tokens=st.integers(1, 90),
        speculative=st.sampled_from([None, None, "ngram"]),
    )
    wanted = data.draw(st.lists(params, min_size=1, max_size=4))
    turns = data.draw(st.lists(st.integers(0, 3), max_size=60))
    found: list[list[list[int | None]]] = []
    for model in (llm(1), llm(2)):
        streams = [model.stream(prompt(n), params=params, seed=n) for n, params in enumerate(wanted)]
        tokens: list[list[int | None]] = [[] for _ in streams]
        for turn in (*turns, *range(len(streams))):
            if turn < len(streams) and (chunk := next(streams[turn], None)):
                tokens[turn].append(chunk.token)
        for stream, of in zip(streams, tokens, strict=True):
            of += [chunk.token for chunk in stream]
        found.append(tokens)
    assert found[0] == found[1]


def test_the_next_pass_is_begun_once_one_was_guessed() -> None:
    """The inverse of the tests here, which show nothing where nothing is begun."""
    backend, ahead = engine(2), []
    kv = backend.new_kv(2, BLOCK)
    for _ in decoding(backend, kv, 70):
        ahead.append(kv.storage.written_ahead)
    # The first is not guessed, nor is the one whose block was not known: after each, the next has to be right first.
    assert ahead == [n not in (0, 63, 64) for n in range(70)]
    for given_up_by in (lambda: kv.ended([0]), lambda: kv.resize(kv.num_blocks + 1), lambda: kv.copy([(0, 2)])):
        for _ in decoding(backend, kv, 3):
            pass
        assert kv.storage.written_ahead
        given_up_by()
        assert not kv.storage.written_ahead
    alone = engine(1).new_kv(2, BLOCK)
    for _ in decoding(engine(1), alone, 9):
        assert not alone.storage.written_ahead


def test_weights_may_change_amid_a_pass_begun_ahead() -> None:
    found = []
    for threads in (1, 2):
        backend = CpuBackend.from_checkpoint(in_memory(CONFIG, random_weights(CONFIG)), quantize="q8", threads=threads)
        kv = backend.new_kv(1, BLOCK)
        *_, last = decoding(backend, kv, 4)
        assert kv.storage.written_ahead == (threads == 2)
        backend.model.set_norm("input_layernorm", 1, np.full(CONFIG.hidden_size, 3, np.float32))
        found.append(backend.forward(Batch.of([Run([int(last.argmax())], 4, [0])]), kv).tobytes())
    assert found[0] == found[1]


@pytest.mark.parametrize("ends", ["length", "stop", "cancel", "close"])
def test_nothing_is_begun_for_texts_that_have_ended(ends: str) -> None:
    backend = CpuBackend.from_checkpoint(in_memory(CONFIG, random_weights(CONFIG)), quantize="q8", threads=2)
    made: list[CpuKV] = []
    new = backend.new_kv
    backend.new_kv = lambda *size: made.append(new(*size)) or made[-1]  # type: ignore[method-assign,func-returns-value]
    fifth = llm(1).generate([1, 2, 3], max_new_tokens=5, ignore_eos=True).tokens[4]
    params = SamplingParams(
        max_new_tokens=5 if ends == "length" else 20, ignore_eos=True, stop_token_ids=(fifth,) if ends == "stop" else ()
    )
    scheduler = Scheduler(backend)
    request = scheduler.add([1, 2, 3], params, 0)
    seen = []
    while scheduler.has_work:
        events = scheduler.step()
        seen.append(made[0].storage.written_ahead)
        if len(seen) == 5 and ends == "cancel":
            scheduler.cancel(request)
        elif len(seen) == 5 and ends == "close":
            scheduler.close()
    assert (len(seen), events[-1].step) == (5, 4)
    assert seen[:4] == [False, False, True, True]
    assert not made[0].storage.written_ahead


def test_a_reader_who_pauses_keeps_no_thread_busy() -> None:
    stream = llm(2).stream([1, 2, 3], max_new_tokens=50, ignore_eos=True)
    for _ in range(5):
        next(stream)
    until = time.monotonic() + 120

    def rests() -> bool:
        before = time.process_time()
        time.sleep(0.3)
        return time.process_time() - before < 0.1

    while not (rested := rests()) and time.monotonic() < until:  # a busy machine may be at the last pass still
        pass
    assert rested
    assert len(list(stream)) == 45


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_goes_on_by_itself() -> None:
    program = """
import os, sys
sys.path[:0] = sys.argv[1:]
from test_cpu_ahead import BLOCK, decoding, engine
backend = engine(2)
kv, whole = backend.new_kv(2, BLOCK), backend.new_kv(2, BLOCK)
expected = [logits.tobytes() for logits in decoding(backend, whole, 60)]
passes = decoding(backend, kv, 60)
found = [next(passes).tobytes() for _ in range(30)]
assert kv.storage.written_ahead
child = os.fork()
found += [logits.tobytes() for logits in passes]
assert found == expected
if child:
    assert os.waitpid(child, 0)[1] == 0
    print("both")
"""
    here = Path(__file__).parent
    command = [sys.executable, "-c", program, str(here), str(here.parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.stdout == "both\n", done.stderr


def test_programs_end_amid_a_pass_begun_ahead() -> None:
    program = """
import sys
sys.path[:0] = sys.argv[1:]
from test_cpu_ahead import BLOCK, decoding, engine
backend = engine(2)
kv = backend.new_kv(2, BLOCK)
passes = decoding(backend, kv, 60)
for _ in range(5):
    next(passes)
assert kv.storage.written_ahead
print("end")
"""
    here = Path(__file__).parent
    for _ in range(5):
        command = [sys.executable, "-c", program, str(here), str(here.parent)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
