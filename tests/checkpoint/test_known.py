"""Names of llama2.c's models: files come from a hub on loopback, whole or not at all, with their tokenizers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import Hub, Repo, serve
from llama2c_files import save_llama2c
from test_hub import Client
from tiny import byte_tokenizer, random_weights, tiny_config

import pronk
from pronk.checkpoint.hub import known, pinned
from pronk.checkpoint.hub.pinned import PinnedModel
from pronk.errors import NoTokenizer

STORIES = known.MODELS["stories260K"]


@pytest.fixture
def server(data: Path) -> Iterator[Hub]:
    """The real files, where they are here; others, as large as the real ones, elsewhere."""
    repos: dict[str, Repo] = {}
    for model in (*known.MODELS.values(), *known.TOKENIZERS.values()):
        for pin in model.files if isinstance(model, PinnedModel) else ():
            here = data / pin.file
            if pin.file == "tokenizer.model":
                here = data / "llama-tokenizers" / "llama2.tokenizer.model"
            files = repos.setdefault(pin.repository, Repo({pin.revision: {}})).history[pin.revision]
            files[pin.file] = here.read_bytes() if here.exists() else b"something else"
    with serve(repos) as running:
        yield running


@pytest.fixture
def client(tmp_path: Path, server: Hub) -> Client:
    return Client(tmp_path, server.url)


@pytest.mark.parametrize("name", ["stories260K", "stories260k"])
def test_a_model_comes_with_its_tokenizer(client: Client, server: Hub, name: str) -> None:
    path = client.resolve(name)
    assert path == client.folder / "pronk" / "models" / "stories260K" / "stories260K.bin"
    assert sorted(file.name for file in path.parent.iterdir()) == ["stories260K.bin", "tok512.bin"]
    assert "downloading stories260K/stories260K.bin of karpathy/tinyllamas (1.1 MB)" in client.stderr
    llm = pronk.load(path, threads=1)
    assert llm.generate("Once upon a time", max_new_tokens=8).text.startswith(", there was a little g")
    seen = len(server.requests)
    assert client.resolve(name) == path
    assert (len(server.requests), client.stderr) == (seen, "")  # what is here needs no network
    listed = {model[0]: model[1:] for model in client.call("cached")["result"]}
    assert listed["stories260K"] == [str(path), 1_056_540 + 6_227]
    assert listed["stories15M"][0] is None
    assert listed["llama3.2:1b"] == [None, None]


def test_pull_verifies_and_mends(client: Client) -> None:
    path = client.resolve("stories260K")
    assert client.call("pull", "stories260K")["result"] == str(path)
    assert client.stderr == "stories260K: already there, verified\n"
    sound = path.read_bytes()
    path.write_bytes(sound[:-1] + b"x")
    assert client.resolve("stories260K") == path
    assert client.call("pull", "stories260K")["result"] == str(path)
    assert "is damaged; downloading it again" in client.stderr
    assert path.read_bytes() == sound


def test_other_bytes_are_thrown_away(client: Client) -> None:
    line = client.refusal("DownloadFailed", "resolve", "stories15M")
    assert line.startswith("stories15M: stories15M.bin came with the wrong sha256 and was thrown away; try again")
    assert list((client.folder / "pronk" / "models" / "stories15M").iterdir()) == []


def test_one_download_goes_on_where_it_broke_off(client: Client, server: Hub) -> None:
    server.cut_after["stories260K.bin"] = 500_000
    path = client.resolve("stories260K")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == STORIES.files[0].sha256  # type: ignore[union-attr]


def test_no_space_is_said_before_anything_comes(client: Client, server: Hub) -> None:
    line = client.refusal("DownloadFailed", "resolve", "stories110M", free=1000)
    assert "stories110M: 438.9 MB of free disk space are needed" in line
    assert server.requests == []


def test_a_tokenizer_by_name(client: Client, data: Path) -> None:
    for name, file in (("llama2", "tokenizer.model"), ("tok512", "tok512.bin")):
        answer = client.call("tokenizer", name)
        assert answer["result"] == str(client.folder / "pronk" / "tokenizers" / name / file)
    assert client.call("tokenizer", "elsewhere")["result"] is None


def test_what_is_pinned_is_what_the_data_beside_the_project_is(data: Path) -> None:
    """The hashes of files that others gave us, and sizes that the shapes of llama2.c's format call for."""
    for name in ("stories260K", "tok512"):
        model = known.MODELS.get(name) or known.TOKENIZERS[name]
        assert isinstance(model, PinnedModel)
        for pin in model.files:
            content = (data / pin.file).read_bytes()
            assert (len(content), hashlib.sha256(content).hexdigest()) == (pin.nbytes, pin.sha256)
    llama2 = (data / "llama-tokenizers" / "llama2.tokenizer.model").read_bytes()
    assert hashlib.sha256(llama2).hexdigest() == known.TOKENIZERS["llama2"].files[0].sha256
    shapes = {"15M": (288, 768, 6, 256), "42M": (512, 1376, 8, 1024), "110M": (768, 2048, 12, 1024)}
    for size, (dim, hidden, layers, context) in shapes.items():
        floats = 32_000 * dim + layers * (2 * dim + 4 * dim * dim + 3 * dim * hidden) + dim
        heads = {288: 6, 512: 8, 768: 12}[dim]
        weights = known.MODELS[f"stories{size}"].files[0]  # type: ignore[union-attr]
        assert weights.nbytes == 28 + 4 * (floats + context * dim // heads)


def test_a_bin_alone_says_which_tokenizer_it_wants(tmp_path: Path) -> None:
    for size, said in (
        (512, r"one of 512 tokens is stories260K's: put it beside the file, or --tokenizer tok512 downloads it"),
        (300, r"name one of 300 tokens with --tokenizer FILE"),
    ):
        config = tiny_config(vocab_size=size)
        path = tmp_path / f"{size}.bin"
        save_llama2c(path, config, random_weights(config), 0)
        with pytest.raises(NoTokenizer, match=said + r" \(tokenizer= in Python\)"):
            pronk.load(path, threads=1).generate("Once")


def test_a_known_tokenizer_is_loaded_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(vocab_size=259)
    (tmp_path / "m").mkdir()
    save_llama2c(tmp_path / "m" / "m.bin", config, random_weights(config), 0)
    own = byte_tokenizer(tmp_path / "own.bin")
    monkeypatch.setattr(pinned, "fetch", lambda model, *, progress=True: own if model.name == "llama2" else None)
    llm = pronk.load(tmp_path / "m" / "m.bin", tokenizer="llama2", threads=1)
    assert llm.tokenizer.decode([ord("a") + 3]) == "a"
    assert llm.tokenizer.vocab_size == 259
