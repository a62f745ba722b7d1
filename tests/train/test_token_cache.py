"""The token cache: what it gives is what encoding gives, to the bit, or nothing; and data are never held whole."""

from __future__ import annotations

import json
import os
import random
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from datetime import date, timedelta
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_folder import save_tiny_chat_model
from training_runs import timeless

import pronk
from pronk import tokenizer as tokenizers
from pronk.checkpoint.hub import local
from pronk.errors import BadFile
from pronk.tokenizer.vocabulary import TokenizerSource
from pronk.train.data import encoded, records, store, token_cache
from pronk.train.data.examples import Encoder, Example, Judged, Pair, content
from pronk.train.data.sources import Data, prepare
from pronk.train.data.store import Picked, Store
from pronk.train.data.token_cache import TokenCache
from pronk.train.objectives.dpo import DPO
from pronk.train.objectives.kto import KTO
from pronk.train.objectives.reward import Reward
from pronk.train.objectives.sft import SFT
from pronk.train.settings import Settings

QUICK: dict[str, Any] = {
    "lora_rank": 4, "lr": 0.02, "max_steps": 6, "accumulate": 2, "batch_size": 2, "eval_every": 3, "samples": 0,
    "device": "cpu", "threads": 1,
}  # fmt: skip
CTX = 256


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TokenizerSource:
    return tokenizers.find(save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=CTX))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRONK_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(token_cache, "LEAST", 0)
    return tmp_path / "home" / "tokens"


def kept(home: Path) -> list[Path]:
    return sorted(path for path in home.iterdir() if path.suffix == ".tokens") if home.exists() else []


def lines(path: Path, count: int = 60) -> Path:
    """Conversations, instructions and texts, some of them twice, and two keys that nobody reads."""
    drawn = random.Random(0)
    found: list[dict[str, Any]] = []
    for number in range(count):
        said = " ".join(drawn.choice(("one", "two", "drei", "vier é")) for _ in range(drawn.randrange(1, 12)))
        found.append(
            [
                {"messages": [{"role": "user", "content": said}, {"role": "assistant", "content": f"No {number}."}]},
                {"prompt": said, "completion": f" {number}", "id": number},
                {"text": said},
                {"instruction": said, "output": "Yes."},
            ][number % 4]
        )
    path.write_text("".join(json.dumps(record) + "\n" for record in [*found, *found[:5]]), encoding="utf-8")
    return path


def made(settings: Settings, source: TokenizerSource, cached: bool = True) -> Data:
    return prepare(settings, tokenizers.load(source), CTX, cache=TokenCache(source) if cached else None)


def same(one: Data, other: Data) -> bool:
    def seen(data: Data) -> list[Any]:
        examples = [[content(example) for example in part] for part in (data.train, data.held_out)]
        return [examples, list(data.names), *(value for name, value in vars(data).items() if name not in SEQUENCES)]

    return seen(one) == seen(other)


SEQUENCES = ("train", "held_out", "names")


def forbidden(monkeypatch: pytest.MonkeyPatch, *kinds: type) -> None:
    def encode(*_: Any) -> Any:
        raise AssertionError("encoded once more")

    for kind in kinds:
        monkeypatch.setattr(kind, "encode", encode)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"seed": 3, "eval_share": 0.3, "max_length": 30, "too_long": "cut"},
        {"eval_share": 0.0, "max_length": 25, "too_long": "skip"},
        {"objective": SFT(train_on_prompt=True, instructions="alpaca")},
        {"fields": ("id=",)},
    ],
)
def test_the_data_are_those_without_a_cache(
    source: TokenizerSource, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    settings = Settings("m", str(lines(tmp_path / "data.jsonl")), **options)
    plain = made(settings, source, cached=False)
    assert not kept(home)
    assert same(plain, made(settings, source))
    assert len(kept(home)) == 1
    with monkeypatch.context() as patch:
        forbidden(patch, SFT)
        again = made(settings, source)
    assert same(plain, again)
    assert again.duplicates == plain.duplicates > 0
    assert again.unused.keys() == ({"id"} - {"id"} if options.get("fields") else {"id"})


def test_what_is_held_out_is_what_sets_of_whole_examples_give(source: TokenizerSource, tmp_path: Path) -> None:
    """By lists, dictionaries and sets, as pronk chose before there was a store."""
    files = [lines(tmp_path / "a.jsonl", 40), lines(tmp_path / "b.jsonl", 23)]
    settings = Settings("m", (f"{files[0]}=1.5", f"{files[1]}=2"), seed=5, eval_share=0.2)
    codec = tokenizers.load(source)
    encoder = Encoder(codec, CTX)
    examples, names, origins = [], [], []
    for number, file in enumerate(files):
        for record in records.read(file, SFT.kinds).items:
            (example,) = SFT().encode(record, encoder)
            examples.append(example)
            names.append(f"{file}: {record.where}")
            origins.append(number)
    every = [content(example) for example in examples]
    distinct = list(dict.fromkeys(every))
    draw = np.random.Generator(np.random.PCG64([5]))
    chosen = {distinct[i] for i in draw.permutation(len(distinct))[: round(0.2 * len(distinct))].tolist()}
    seen: list[int] = []
    for number, weight in enumerate((1.5, 2.0)):
        own = [i for i, one in enumerate(every) if one not in chosen and origins[i] == number]
        more = draw.permutation(len(own))[: round(len(own) * (weight % 1))].tolist() if weight % 1 else []
        seen += own * int(weight) + [own[i] for i in sorted(more)]
    for cached in (False, True, True):
        data = made(settings, source, cached)
        assert [content(example) for example in data.train] == [every[i] for i in seen]
        assert list(data.names) == [names[i] for i in seen]
        assert [content(example) for example in data.held_out] == [one for one in every if one in chosen]
        assert data.duplicates == len(every) - len(distinct)


def test_eval_data_have_a_file_of_their_own(source: TokenizerSource, tmp_path: Path, home: Path) -> None:
    settings = Settings("m", str(lines(tmp_path / "a.jsonl")), eval_data=str(lines(tmp_path / "b.jsonl", 8)))
    plain = made(settings, source, cached=False)
    assert same(plain, made(settings, source))
    assert same(plain, made(settings, source))
    assert len(kept(home)) == 2
    assert plain.held_out
    assert not {content(one) for one in plain.train} & {content(one) for one in plain.held_out}


def test_pairs_and_folders_too(source: TokenizerSource, tmp_path: Path, home: Path) -> None:
    pairs = [{"prompt": f"{n}?", "chosen": " yes", "rejected": " no", "margin": n / 3} for n in range(12)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    settings = Settings("m", str(tmp_path / "pairs.jsonl"), objective=DPO())
    assert same(made(settings, source, cached=False), made(settings, source))
    data = made(settings, source)
    assert len(kept(home)) == 1
    assert isinstance(data.train[0], Pair)
    assert data.train[0] is data.train[0]  # the reference knows pairs by identity
    made(replace(settings, objective=DPO(beta=0.5)), source)
    assert len(kept(home)) == 1, "what a loss is made of changes no token"
    for _ in range(2):
        scored = made(replace(settings, objective=Reward()), source)
        assert {pair.margin for pair in (*scored.train, *scored.held_out)} == {n / 3 for n in range(12)}
    assert len(kept(home)) == 2
    (tmp_path / "texts" / "inner").mkdir(parents=True)
    (tmp_path / "texts" / "a.txt").write_text("One.")
    (tmp_path / "texts" / "inner" / "b.txt").write_text("Two.")
    settings = Settings("m", str(tmp_path / "texts"))
    assert same(made(settings, source, cached=False), made(settings, source))
    assert len(kept(home)) == 3
    (tmp_path / "table").write_text("text\nTwo.\n")
    shutil.copy(tmp_path / "table", tmp_path / "table.txt")  # the same bytes, and one text by its name
    both = (made(Settings("m", str(tmp_path / name)), source).train for name in ("table", "table.txt"))
    assert [len(one) for (one,) in both] == [5, 11]
    (tmp_path / "texts" / "inner" / "b.txt").write_text("Six.")
    assert list(made(settings, source).names)[1].endswith("inner/b.txt")
    assert len(kept(home)) == 6


@pytest.mark.skipif(os.name == "nt", reason="such permissions are POSIX's")
def test_nobody_else_may_read_what_data_became(source: TokenizerSource, tmp_path: Path, home: Path) -> None:
    data = lines(tmp_path / "data.jsonl")
    data.chmod(0o600)
    made(Settings("m", str(data)), source)
    (file,) = kept(home)
    assert file.stat().st_mode & 0o777 == 0o600


def test_judged_answers_too(source: TokenizerSource, tmp_path: Path, home: Path) -> None:
    records = [{"prompt": f"{n}?", "completion": " yes", "label": n % 3 > 0} for n in range(12)]
    (tmp_path / "judged.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = Settings("m", str(tmp_path / "judged.jsonl"), objective=KTO())
    assert same(made(settings, source, cached=False), made(settings, source))
    assert len(kept(home)) == 1
    data = made(settings, source)
    assert sorted(one.good for one in (*data.train, *data.held_out)) == [False] * 4 + [True] * 8
    assert all(isinstance(one, Judged) for one in data.train)
    assert data.train[0] is data.train[0]  # the reference knows them by identity


@pytest.mark.parametrize("form", ["json", "csv", "parquet"])
def test_every_container(source: TokenizerSource, tmp_path: Path, home: Path, form: str) -> None:
    texts = [{"text": f"Number {n}, and no more."} for n in range(30)]
    path = tmp_path / f"data.{form}"
    if form == "json":
        path.write_text(json.dumps(texts))
    elif form == "csv":
        path.write_text("text\n" + "".join(f'"{one["text"]}"\n' for one in texts))
    else:
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(texts), path)
    settings = Settings("m", str(path))
    plain = made(settings, source, cached=False)
    assert len(plain.train) + len(plain.held_out) == 30
    assert same(plain, made(settings, source))
    assert same(plain, made(settings, source))
    assert len(kept(home)) == 1


def test_a_run_has_the_same_losses_to_the_bit(
    source: TokenizerSource, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, model = lines(tmp_path / "data.jsonl"), source.path.parent
    pronk.finetune(model, data, tmp_path / "without", token_cache=False, **QUICK).run()
    assert not kept(home)
    pronk.finetune(model, data, tmp_path / "cold", **QUICK).run()
    assert len(kept(home)) == 1
    forbidden(monkeypatch, SFT)
    pronk.finetune(model, data, tmp_path / "warm", **QUICK).run()
    assert timeless(tmp_path / "without") == timeless(tmp_path / "cold") == timeless(tmp_path / "warm")
    weights = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("without", "cold", "warm")]
    assert weights[0] == weights[1] == weights[2]
    recipes = [(tmp_path / name / "run.yaml").read_text() for name in ("without", "cold")]
    assert ["no-token-cache: true" in recipe for recipe in recipes] == [True, False]


def test_a_run_goes_on_from_one_without_a_cache(source: TokenizerSource, tmp_path: Path) -> None:
    data, model = lines(tmp_path / "data.jsonl"), source.path.parent
    pronk.finetune(model, data, tmp_path / "whole", **QUICK).run()
    run = pronk.finetune(model, data, tmp_path / "parts", token_cache=False, **QUICK)
    for metrics in run:
        if metrics["step"] == 2:
            break
    pronk.finetune(model, data, tmp_path / "parts", resume=True, **QUICK).run()
    assert timeless(tmp_path / "parts") == timeless(tmp_path / "whole")


def _edited(path: Path) -> None:
    path.write_text(path.read_text().replace("one", "0ne", 1))


OTHER: dict[str, Callable[[Settings, Path], Settings]] = {
    "template": lambda s, at: replace(s, chat_template="llama3"),
    "length": lambda s, at: replace(s, max_length=200),
    "too long": lambda s, at: replace(s, too_long="skip"),
    "bad records": lambda s, at: replace(s, skip_bad=True),
    "fields": lambda s, at: replace(s, fields=("id=",)),
    "prompts": lambda s, at: replace(s, objective=SFT(train_on_prompt=True)),
    "instructions": lambda s, at: replace(s, objective=SFT(instructions="alpaca")),
    "data": lambda s, at: (_edited(at), s)[1],  # type: ignore[func-returns-value]
}


@pytest.mark.parametrize("what", OTHER)
def test_what_changes_an_encoding_changes_the_name(
    source: TokenizerSource, tmp_path: Path, home: Path, what: str
) -> None:
    data = lines(tmp_path / "data.jsonl")
    settings = Settings("m", str(data))
    made(settings, source)
    before = data.stat()
    changed = OTHER[what](settings, data)
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))  # the time of a file tells nothing
    assert same(made(changed, source), made(changed, source, cached=False))
    assert len(kept(home)) == 2


def test_a_template_that_writes_the_date_encodes_anew_each_day(
    source: TokenizerSource, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings("m", str(lines(tmp_path / "data.jsonl")))
    dated = replace(source, chat_template=f"{{{{ strftime_now('%d %b %Y') }}}}{source.chat_template}")
    for _ in range(2):
        made(settings, dated)
        made(settings, source)
    assert len(kept(home)) == 2

    class Tomorrow(date):
        @classmethod
        def today(cls) -> date:
            return date.today() + timedelta(days=1)

    monkeypatch.setattr(encoded, "date", Tomorrow)
    made(settings, dated)
    made(settings, source)
    assert len(kept(home)) == 3


def test_another_tokenizer_or_another_pronk_encodes_anew(
    source: TokenizerSource, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings("m", str(lines(tmp_path / "data.jsonl")))
    made(settings, source)
    made(settings, replace(source, chat_template=source.chat_template + " "))
    assert len(kept(home)) == 2
    folder = shutil.copytree(source.path.parent, tmp_path / "model")
    there = tokenizers.find(folder)
    made(settings, there)
    assert len(kept(home)) == 2, "a copy is the same tokenizer"
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + " ")
    made(settings, there)
    assert len(kept(home)) == 3
    monkeypatch.setattr(token_cache, "_code", lambda: "of tomorrow")
    made(settings, source)
    assert len(kept(home)) == 4


def test_what_does_not_change_an_encoding_does_not(source: TokenizerSource, tmp_path: Path, home: Path) -> None:
    data = lines(tmp_path / "data.jsonl")
    made(Settings("m", str(data)), source)
    moved = data.rename(tmp_path / "elsewhere")
    os.utime(moved)
    again = made(Settings("n", f"{moved}=2", seed=9, lr=1.0, batch_size=4), source)
    assert len(kept(home)) == 1
    assert again.names[0].startswith(f"{moved}: line ")


@pytest.mark.parametrize("damage", ["flipped", "short", "long", "empty", "zero"])
def test_a_damaged_file_is_made_anew(source: TokenizerSource, tmp_path: Path, home: Path, damage: str) -> None:
    settings = Settings("m", str(lines(tmp_path / "data.jsonl")))
    plain = made(settings, source)
    (file,) = kept(home)
    whole = file.read_bytes()
    places = [0, len(whole) // 3, len(whole) // 2, len(whole) - 100, len(whole) - 20, len(whole) - 1]
    for at in places if damage == "flipped" else places[:1]:
        broken = {
            "flipped": whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :],
            "short": whole[:-5],
            "long": whole + whole[-8:],
            "empty": b"",
            "zero": bytes(len(whole)),
        }[damage]
        file.unlink()  # what is mapped already is nobody's to change
        file.write_bytes(broken)
        assert token_cache.opened(file) is None
        assert same(plain, made(settings, source))
        assert file.read_bytes() == whole
        assert token_cache.opened(file) is not None


def test_nothing_bad_is_kept(source: TokenizerSource, tmp_path: Path, home: Path) -> None:
    data = lines(tmp_path / "data.jsonl")
    with data.open("a") as file:
        file.write(
            '{"txt": 1}\n{"messages": [{"role": "assistant", "content": "Hi"}, {"role": "x", "content": "a"}]}\n'
        )
    messages = []
    for cached in (False, True):
        with pytest.raises(BadFile) as caught:
            made(Settings("m", str(data)), source, cached)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert "line 66" in messages[0]
    assert not list(home.iterdir())
    settings = Settings("m", str(data), skip_bad=True)
    plain = made(settings, source, cached=False)
    assert len(plain.skipped) == 2
    assert same(plain, made(settings, source))
    assert same(plain, made(settings, source))


def test_small_data_are_not_kept(
    source: TokenizerSource, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = lines(tmp_path / "data.jsonl")
    monkeypatch.setattr(token_cache, "LEAST", data.stat().st_size + 1)
    made(Settings("m", str(data)), source)
    assert not kept(home)


def test_the_oldest_make_room(
    source: TokenizerSource, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings("m", str(lines(tmp_path / "data.jsonl")))
    made(settings, source)
    (first,) = kept(home)
    made(replace(settings, max_length=200), source)
    (second,) = set(kept(home)) - {first}
    os.utime(first, (1e9, 1e9))
    os.utime(second, (2e9, 2e9))
    monkeypatch.setattr(token_cache, "MOST", 2 * second.stat().st_size + 100)
    made(replace(settings, max_length=199), source)
    assert len(kept(home)) == 2
    assert first not in kept(home)
    os.utime(second, (1e9, 1e9))
    made(replace(settings, max_length=200), source)  # which is used again
    made(replace(settings, max_length=198), source)
    assert second in kept(home)


def test_a_disk_that_fails_costs_nothing_but_the_cache(
    source: TokenizerSource, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings("m", str(lines(tmp_path / "data.jsonl")))
    plain = made(settings, source, cached=False)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 0))  # type: ignore[attr-defined]
        assert same(plain, made(settings, source))
    assert not kept(home)

    def full(self: store.Writer, told: Any) -> None:
        if not isinstance(self._file, BytesIO):
            raise OSError(28, "No space left on device")
        end(self, told)

    end = store.Writer.end
    with monkeypatch.context() as patch:
        patch.setattr(store.Writer, "end", full)
        assert same(plain, made(settings, source))
    assert not list(home.iterdir())
    home.rmdir()
    home.parent.rmdir()
    home.parent.write_text("no folder")
    assert same(plain, made(settings, source))


def test_data_that_change_meanwhile_are_not_kept(
    source: TokenizerSource, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = lines(tmp_path / "data.jsonl")
    end = store.Writer.end

    def edited(self: store.Writer, told: Any) -> None:
        _edited(data)
        end(self, told)

    monkeypatch.setattr(store.Writer, "end", edited)
    found = made(Settings("m", str(data)), source)
    assert len(found.train) > 40, "and yet there is something to train on"
    assert not kept(home)


@pytest.mark.parametrize("vocab_size", [259, 1 << 16, (1 << 16) + 1, 300_000])
def test_a_store_gives_back_what_was_put_in(vocab_size: int) -> None:
    draw = np.random.Generator(np.random.PCG64(vocab_size))
    examples = [
        Example(draw.integers(0, vocab_size, size, np.int32), draw.random(size) < 0.5) for size in (1, 2, 7, 8, 9, 100)
    ]
    examples.append(Example(np.array([vocab_size - 1], np.int32), np.array([True])))
    file = BytesIO()
    writer = store.Writer(file, vocab_size)
    for number, example in enumerate(examples):
        writer.add(example, f"\udcff {number}")
    writer.end({"a": 1})
    assert store.whole(file)
    found = Store(file.getbuffer())
    assert [content(one) for one in found] == [content(one) for one in examples]
    assert found[0].ids.dtype == np.int32
    assert found[-1].loss_mask.dtype == np.bool_
    assert found.lengths.tolist() == [1, 2, 7, 8, 9, 100, 1]
    assert list(found.places) == [f"\udcff {n}" for n in range(7)]
    assert found.told["a"] == 1
    assert list(Picked([found, examples], np.array([8, 0, 13]))[1:][0].ids) == list(examples[0].ids)
    with pytest.raises(IndexError):
        found[7]


def test_no_more_than_a_part_of_the_data_is_in_memory(
    source: TokenizerSource, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 MB of texts, whose tokens alone would be 8 MB: each byte is one here."""
    path = tmp_path / "data.jsonl"
    monkeypatch.setattr(local, "_CHUNK", 1 << 16)  # read at a time
    with path.open("w") as file:
        for number in range(2000):
            file.write(json.dumps({"text": f"{number} " + "abcdefghij " * 90}) + "\n")
    settings = Settings("m", str(path), max_length=1100)
    codec = tokenizers.load(source)

    def peak(cache: TokenCache | None) -> int:
        tracemalloc.start()
        data = prepare(settings, codec, 1100, cache=cache)
        assert sum(1 for one in data.train if len(one) > 900) > 1500
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    without, cold, warm = peak(None), peak(TokenCache(source)), peak(TokenCache(source))
    assert len(kept(home)) == 1
    assert cold < path.stat().st_size / 2
    assert warm < path.stat().st_size / 2
    assert without > 2 * path.stat().st_size, "or this measures nothing"
