"""Several models: loaded when they are asked for, and let go, the least recently used first, when memory lacks."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from served import SEQUENCES, Running, slowed
from tiny_folder import save_tiny_chat_model

import pronk
from pronk.errors import BadRequest
from pronk.serve.models import Models

ASKED: list[Any] = [{"role": "user", "content": "x"}]


def least(folder: Path) -> int:
    """Bytes of the weights, and of a cache for one text."""
    models = Models({"a": str(folder)}, {}, {"threads": 1})
    weights, a_token, ctx_size = models._plan(models.models["a"])
    return weights + ctx_size * a_token


@pytest.fixture
def three(folder: Path) -> Iterator[Running]:
    """Of which memory holds two: each takes half of what is left for its cache, but one text's cache at least."""
    bound = int(2.8 * least(folder))
    names = {name: str(folder) for name in "abc"}
    running = Running(Models(names, {}, {"threads": 1}, max_sequences=SEQUENCES, max_memory=bound))
    yield running
    running.stop()


def loaded(running: Running) -> set[str]:
    return {model.name for model in running.models.loaded}


def say(running: Running, name: str) -> str | None:
    answer = running.client().chat.completions.create(model=name, messages=ASKED, max_tokens=5, seed=1)
    return answer.choices[0].message.content


def test_who_was_idle_longest_gives_way(three: Running) -> None:
    assert loaded(three) == {"a"}
    texts = {say(three, "a"), say(three, "b")}
    assert loaded(three) == {"a", "b"}
    say(three, "a")
    texts.add(say(three, "c"))
    assert loaded(three) == {"a", "c"}
    texts.add(say(three, "b"))
    assert loaded(three) == {"b", "c"}
    assert len(texts) == 1  # it is one model by three names


def test_who_reads_an_adapter_is_in_use(folder: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unloaded meanwhile, it would answer 500."""
    models = Models({"a": str(folder)}, {"poet": adapter}, {"threads": 1}, max_sequences=1)
    users, add = list[int](), pronk.LLM.add_adapter

    def watched(*arguments: Any) -> Any:
        users.append(models.models["a"].users)
        return add(*arguments)

    monkeypatch.setattr(pronk.LLM, "add_adapter", watched)

    async def leased() -> int:
        async with models.lease("poet"):
            return models.models["a"].users

    assert asyncio.run(leased()) == 1
    assert users == [1]
    assert models.models["a"].users == 0
    models.close()


def test_who_is_in_use_stays(three: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    slowed(monkeypatch)  # else both texts may be whole before a third model is asked for
    client = three.client()
    streams = [
        client.chat.completions.create(
            model=name, messages=ASKED, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
        )
        for name in "ab"
    ]
    pieces = [iter(stream) for stream in streams]
    for each in pieces:
        next(each)
    with pytest.raises(
        openai.InternalServerError,
        match=r"c takes [\d.]+ MB at least, beside what is in use, and [\d.]+ MB is the most",
    ) as refused:
        say(three, "c")
    assert refused.value.status_code == 503
    assert refused.value.response.headers["retry-after"]
    assert loaded(three) == {"a", "b"}
    monkeypatch.undo()
    for each in pieces:
        assert [chunk.choices[0].finish_reason for chunk in each][-1] == "length"
    assert say(three, "c") == say(three, "b")


def test_a_model_that_cannot_be_loaded_is_refused_alone(folder: Path, tmp_path: Path) -> None:
    sources = {"good": str(folder), "bad": str(tmp_path / "nothing")}
    running = Running(Models(sources, {}, {"threads": 1}, max_sequences=SEQUENCES))
    with pytest.raises(openai.APIStatusError, match="'bad' cannot be used"):
        say(running, "bad")
    assert say(running, "good")
    running.stop()


def rewarding(adapter: Path, folder: Path) -> Path:
    """A reward model's adapter: the same with a score, which is to be refused before its weights are looked at."""
    folder.mkdir()
    told = json.loads((adapter / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**told, "modules_to_save": ["score"]}))
    return folder


def test_a_reward_model_s_adapter_is_refused_when_the_server_starts(
    folder: Path, adapter: Path, tmp_path: Path
) -> None:
    """It was listed, and refused with a word for Python when it was asked."""
    given = rewarding(adapter, tmp_path / "judge")
    models = Models({"a": str(folder)}, {"poet": adapter, "judge": given}, {"threads": 1})
    with pytest.raises(BadRequest, match=rf"\Ajudge: a reward model's .*pronk score {folder} --adapter {given}\Z"):
        asyncio.run(models.load_all())
    assert not models.loaded


def test_a_reward_model_s_adapter_that_comes_later_is_no_model(folder: Path, adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "poet").symlink_to(adapter)
    models = Models({"a": str(folder)}, {}, {"threads": 1}, adapters_folder=tmp_path, max_sequences=SEQUENCES)
    running = Running(models)
    client = running.client()
    assert say(running, "poet")
    given = rewarding(adapter, tmp_path / "judge")
    assert [model.id for model in client.models.list()] == ["a", "poet"]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("judge")
    with pytest.raises(openai.BadRequestError, match=r"'judge' is a reward model's .*pronk score") as refused:
        say(running, "judge")
    assert str(tmp_path) not in str(refused.value)
    (given / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    (given / "adapter_model.safetensors").symlink_to(adapter / "adapter_model.safetensors")
    assert [model.id for model in client.models.list()] == ["a", "judge", "poet"]  # it is another one by now
    assert say(running, "judge") == say(running, "poet")
    running.stop()


def test_an_adapter_whose_folder_goes_while_it_is_read(
    folder: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: who listed the models just then dropped it, before the one who had read it could take it: 500."""
    (tmp_path / "poet").symlink_to(adapter)
    models = Models({"a": str(folder)}, {}, {"threads": 1}, adapters_folder=tmp_path, max_sequences=SEQUENCES)
    running, add = Running(models), pronk.LLM.add_adapter

    def added(*arguments: Any) -> str:
        name = add(*arguments)
        (tmp_path / "poet").unlink()
        with contextlib.suppress(openai.APITimeoutError):  # it is listed once the adapter is in use
            running.client().models.list(timeout=1)
        return name

    monkeypatch.setattr(pronk.LLM, "add_adapter", added)
    assert say(running, "poet")
    assert [model.id for model in running.client().models.list()] == ["a"]
    assert not models.models["a"].llm.adapters  # type: ignore[union-attr]
    running.stop()


@pytest.mark.parametrize("name", ["a", "a-q8"])
def test_an_adapter_does_not_take_a_model_s_name(folder: Path, adapter: Path, name: str) -> None:
    """It was listed a second time, and the model answered in its place."""
    with pytest.raises(BadRequest, match=f"an adapter and a model are both called {name}; give the adapter another"):
        Models({"a": str(folder)}, {name: adapter}, {"threads": 1}, also=("q8",), max_sequences=SEQUENCES)


def test_a_model_in_another_format_beside_itself(folder: Path) -> None:
    models = Models({"a": str(folder)}, {}, {"threads": 1}, also=("q8", "q8"), max_sequences=SEQUENCES)
    running = Running(models)
    assert models.names == ["a", "a-q8"]
    assert say(running, "a-q8")
    assert [model.llm and model.llm.backend.dtype for model in models.loaded] == ["f32", "q8"]
    running.stop()
    with pytest.raises(BadRequest, match="a-q8"):
        Models({"a": str(folder), "a-q8": str(folder)}, {}, {}, also=("q8",))


def test_a_model_without_a_chat_template_is_given_one(tmp_path: Path) -> None:
    """What a request without one is told names the option that `pronk serve` then has."""
    bare = save_tiny_chat_model(tmp_path / "bare")
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    running = Running(Models({"bare": str(bare)}, {}, {"threads": 1}, max_sequences=SEQUENCES))
    with pytest.raises(openai.BadRequestError, match="--chat-template"):
        say(running, "bare")
    running.stop()
    plain = tmp_path / "plain.jinja"
    plain.write_text("{{ messages[-1].content }}")
    models = Models({"bare": str(bare)}, {}, {"threads": 1}, max_sequences=SEQUENCES, chat_template=str(plain))
    running = Running(models)
    said = say(running, "bare")
    running.stop()
    with pronk.load(bare, threads=1) as llm:
        assert said == llm.chat(ASKED, max_new_tokens=5, temperature=1.0, seed=1, chat_template=plain).text


def test_clients_do_not_learn_where_a_broken_adapter_lies(
    folder: Path, adapter: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its path was told to whoever asked for it."""
    models = Models({"a": str(folder)}, {}, {"threads": 1}, adapters_folder=tmp_path, max_sequences=SEQUENCES)
    running = Running(models)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    (broken / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(openai.InternalServerError, match="'broken' cannot be used; the server's log says why") as told:
        say(running, "broken")
    assert str(tmp_path) not in str(told.value)
    assert str(broken / "adapter_model.safetensors") in caplog.text
    assert say(running, "a")
    running.stop()


def test_an_adapter_whose_config_cannot_be_read_is_left_out(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was listed, and each request for it loaded every model in turn, to be told 500."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "adapter_config.json").write_text("{")
    models = Models({"a": str(folder), "b": str(folder)}, {}, {"threads": 1}, adapters_folder=tmp_path)
    running = Running(models)
    try:
        assert "broken is left out: " in caplog.text
        assert [model.id for model in running.client().models.list()] == ["a", "b"]
        with pytest.raises(openai.NotFoundError, match="'broken' cannot be used; the server's log says why"):
            say(running, "broken")
        assert loaded(running) == {"a"}
    finally:
        running.stop()


@pytest.mark.parametrize("ctx_size", [40, 500])
def test_a_context_of_no_whole_blocks_is_there_to_its_end(folder: Path, ctx_size: int) -> None:
    """With room for one text it ended at the last whole block of 64 tokens, or every request was refused."""
    models = Models({"a": str(folder)}, {}, {"threads": 1, "ctx_size": ctx_size}, max_sequences=1)
    running = Running(models, max_sequences=1)
    try:
        answer = running.client().completions.create(
            model="a", prompt="x", max_tokens=1000, extra_body={"ignore_eos": True}
        )
        assert answer.usage
        assert answer.usage.total_tokens == ctx_size
    finally:
        running.stop()
