"""Names, and Hugging Face repositories from a hub on loopback. huggingface_hub reads its environment when it is
imported, so what talks to that hub runs in a process of its own."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
from hub_server import TOKEN, Hub, Repo, serve
from tiny import random_weights, tiny_config

from pronk import checkpoint
from pronk.checkpoint.hub import download
from pronk.checkpoint.hub import known as names
from pronk.checkpoint.hub import resolve as hub
from pronk.checkpoint.hub.repository import Repository
from pronk.errors import BadRequest, DownloadFailed, ModelNotFound

CONFIG = tiny_config()
WEIGHTS = random_weights(CONFIG)
SHARDS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]


def tiny_files(scale: float = 1.0) -> dict[str, bytes]:
    """A model in two shards, and the kind of thing that lies beside one."""
    halves = [{n: w * scale for j, (n, w) in enumerate(WEIGHTS.items()) if j % 2 == i} for i in (0, 1)]
    where = {name: shard for half, shard in zip(halves, SHARDS, strict=True) for name in half}
    return {
        "README.md": b"tiny",
        "config.json": json.dumps(CONFIG.to_dict()).encode(),
        "model.safetensors.index.json": json.dumps({"weight_map": where}).encode(),
        **{shard: safetensors.numpy.save(half) for half, shard in zip(halves, SHARDS, strict=True)},
        "pytorch_model.bin": bytes(1000),
        "flax/model.msgpack": bytes(1000),
    }


WANTED = {"config.json", "model.safetensors.index.json", *SHARDS}
LARGE = random.Random(0).randbytes(11 << 20)


@pytest.fixture
def server() -> Iterator[Hub]:
    quants = {f"m-{q}.gguf": q.encode() * 100 for q in ("Q4_K_M", "Q8_0")}
    repos = {
        "some/tiny": Repo({"main": tiny_files(), "v1": tiny_files(2.0)}),
        "some/private": Repo({"main": tiny_files()}, private=True),
        "some/gated": Repo({"main": tiny_files()}, gated=True),
        "some/quants": Repo({"main": quants}),
        "some/both": Repo({"main": tiny_files() | {"m-Q8_0.gguf": b"GGUF"}}),
        "some/large": Repo({"main": {"m.gguf": LARGE}}),
        "some/empty": Repo({"main": {"README.md": b""}}),
    }
    with serve(repos) as running:
        yield running


SCRIPT = """
import dataclasses, json, shutil, sys
from pronk.checkpoint.hub import download, known as names, resolve as hub
from pronk.checkpoint.hub.repository import Repository
from pronk.errors import PronkError
free = json.loads(sys.argv.pop(1))
if free is not None:
    shutil.disk_usage = lambda path: shutil._ntuple_diskusage(free, 0, free)
try:
    result = getattr(hub, sys.argv[1])(*sys.argv[2:])
    if isinstance(result, list):
        result = [dataclasses.astuple(m) for m in result]
    print(json.dumps({"result": result}, default=str))
except PronkError as error:
    print(json.dumps({"error": type(error).__name__, "line": str(error)}))
"""


@dataclasses.dataclass
class Client:
    """Calls pronk.checkpoint.hub.resolve in a new process, with a Hugging Face cache of its own."""

    folder: Path
    url: str
    stderr: str = ""

    def call(self, *args: str, free: int | None = None, **environ: str) -> Any:
        environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))},
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(self.folder / "hf"),
            "PRONK_HOME": str(self.folder / "pronk"),
            "NO_PROXY": "*",
            **environ,
        }
        command = [sys.executable, "-c", SCRIPT, json.dumps(free), *args]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr
        self.stderr = done.stderr
        return json.loads(done.stdout)

    def resolve(self, name: str, **options: Any) -> Path:
        answer = self.call("resolve", name, **options)
        assert "result" in answer, answer
        return Path(answer["result"])

    def refusal(self, kind: str, *args: str, **options: Any) -> str:
        """The one line of an error of that kind; nothing else is printed."""
        answer = self.call(*args, **options)
        assert answer.get("error") == kind, answer
        assert "\n" not in answer["line"]
        assert self.stderr == "" or self.stderr.startswith("downloading"), self.stderr
        return str(answer["line"])


@pytest.fixture
def client(tmp_path: Path, server: Hub) -> Client:
    return Client(tmp_path, server.url)


def half_written(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.name.endswith((".incomplete", ".tmp"))]


# Names


def test_a_path_wins_over_every_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("smollm2", "some/tiny", "x.gguf"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
        assert hub.resolve(name) == Path(name)
        assert hub.resolve(tmp_path / name) == tmp_path / name
    assert hub.resolve("~/x.gguf") == tmp_path / "x.gguf"


@pytest.mark.parametrize(
    "name", ["./m", "../m", "/nowhere/m.gguf", "~/m", "~nobody-here/m", "m.gguf", "dir/model.bin", Path("some/tiny")]
)
def test_a_path_that_leads_nowhere(name: str | Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no such file or folder$"):
        hub.resolve(name)


@pytest.mark.parametrize("name", ["", "smolm2", "a/b/c", "a b/c", "http://host/a/b", "a/b@", "a/b:", "x" * 5000, "\0"])
def test_what_is_no_name_at_all(name: str) -> None:
    with pytest.raises(ModelNotFound, match="no repository") as caught:
        hub.resolve(name)
    assert "smollm2:135m" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["smolm2", "smollm2:153m", "smollm2-360m"])
def test_a_name_that_is_nearly_right(name: str) -> None:
    with pytest.raises(ModelNotFound, match="did you mean smollm2"):
        hub.resolve(name)


def test_a_revision_is_never_dropped(tmp_path: Path) -> None:
    for name in (tmp_path, "smollm2:135m"):
        with pytest.raises(BadRequest, match="revision='v1'"):
            hub.resolve(name, revision="v1")
    with pytest.raises(BadRequest, match="one revision"):
        hub.resolve("some/tiny@v1", revision="v2")


def test_a_path_is_not_pulled(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="already"):
        hub.pull(str(tmp_path))


def test_importing_it_is_light() -> None:
    code = "import sys, pronk.checkpoint.hub.resolve; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"huggingface_hub", "tqdm", "filelock", "platformdirs", "torch"} & set(modules)


# Repositories


def test_a_whole_model_comes_and_opens(client: Client, server: Hub) -> None:
    folder = client.resolve("some/tiny")
    assert {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} == WANTED
    opened = checkpoint.open(folder)
    assert opened.config == CONFIG
    assert all((opened.tensors[name].read() == weights).all() for name, weights in WEIGHTS.items())
    assert re.fullmatch(r"downloading some/tiny \([\d.]+ kB\)\n", client.stderr)

    before = len(server.requests)
    assert client.resolve("some/tiny") == folder
    assert all("/api/" in r.path for r in server.requests[before:])  # asked for news, fetched nothing
    assert client.stderr == ""


def test_a_revision_is_pinned(client: Client, server: Hub) -> None:
    main, v1 = client.resolve("some/tiny"), client.resolve("some/tiny@v1")
    assert main != v1
    name = "model.norm.weight"
    ratio = checkpoint.open(v1).tensors[name].read() / checkpoint.open(main).tensors[name].read()
    assert (ratio == 2).all()
    answer = client.call("resolve", f"some/tiny@{v1.name}")  # the commit itself
    assert answer == {"result": str(v1)}
    before = len(server.requests)
    client.call("resolve", f"some/tiny@{v1.name}")
    assert len(server.requests) == before  # a commit never changes: nobody was asked


def test_one_file_of_many(client: Client, server: Hub) -> None:
    path = client.resolve("some/quants:Q8_0")
    assert path.name == "m-Q8_0.gguf"
    assert path.read_bytes() == b"Q8_0" * 100
    assert not server.seen("GET", "m-Q4_K_M.gguf")
    assert "m-Q4_K_M.gguf" in client.refusal("ModelNotFound", "resolve", "some/quants")
    assert client.resolve("some/quants:Q8_0", HF_HUB_OFFLINE="1") == path
    assert "HF_HUB_OFFLINE" in client.refusal("DownloadFailed", "resolve", "some/quants:Q4_K_M", HF_HUB_OFFLINE="1")


def test_two_models_that_come_to_lie_in_one_folder(client: Client) -> None:
    """Each was fetched under its own name, and each is still found by it once the other lies beside it."""
    alone = client.resolve("some/both")
    assert alone.is_dir()
    assert client.resolve("some/both:Q8_0") == alone / "m-Q8_0.gguf"
    with pytest.raises(ModelNotFound, match="several models"):
        checkpoint.open(alone)  # the inverse: the folder no longer says which
    for name in ("some/both", f"some/both@{alone.name}"):
        path = client.resolve(name)
        assert checkpoint.open(path).tensors.keys() == WEIGHTS.keys()
        assert client.resolve(name, HF_HUB_OFFLINE="1") == path
    listed = {entry[0]: Path(entry[1]) for entry in client.call("cached")["result"] if entry[1]}
    assert listed == {"some/both": path, "some/both:m-Q8_0.gguf": alone / "m-Q8_0.gguf"}


def test_a_cut_connection_is_resumed(client: Client, server: Hub) -> None:
    cut = len(LARGE) - 1000
    server.cut_after["m.gguf"] = cut
    path = client.resolve("some/large")
    assert path.read_bytes() == LARGE
    first, second = server.seen("GET", "m.gguf")
    assert first.range is None
    assert second.range
    start = int(second.range.removeprefix("bytes=").removesuffix("-"))
    assert 0 < start <= cut  # huggingface_hub keeps whole chunks of 10 MiB


def test_the_token_goes_to_the_hub_and_no_further(client: Client, server: Hub) -> None:
    folder = client.resolve("some/private", HF_TOKEN=TOKEN)
    assert {p.name for p in folder.iterdir()} == WANTED
    assert all(r.token for r in server.requests if r.path.startswith(("/api/models", "/some/")))
    elsewhere = [r for r in server.requests if r.path.startswith("/blob/")]
    assert len(elsewhere) == len(SHARDS)
    assert not any(r.token for r in elsewhere)


def test_without_a_token(client: Client) -> None:
    assert "HF_TOKEN" in client.refusal("ModelNotFound", "resolve", "some/private")
    line = client.refusal("DownloadFailed", "resolve", "some/gated")
    assert "gated" in line
    assert "licence" in line
    assert "HF_TOKEN" in line
    assert client.resolve("some/gated", HF_TOKEN=TOKEN).is_dir()


def test_what_is_not_there(client: Client) -> None:
    assert "no such repository" in client.refusal("ModelNotFound", "resolve", "some/thing")
    assert "'v9'" in client.refusal("ModelNotFound", "resolve", "some/tiny@v9")
    assert "holds no" in client.refusal("ModelNotFound", "resolve", "some/empty")
    assert "no such file" in client.refusal("ModelNotFound", "resolve", "some/bad..name")


def test_offline(client: Client, server: Hub) -> None:
    offline = {"HF_HUB_OFFLINE": "1"}
    assert "HF_HUB_OFFLINE" in client.refusal("DownloadFailed", "resolve", "some/tiny", **offline)
    assert server.requests == []
    folder = client.resolve("some/tiny")
    before = len(server.requests)
    assert client.resolve("some/tiny", **offline) == folder
    assert client.stderr == ""
    assert "HF_HUB_OFFLINE" in client.refusal("DownloadFailed", "pull", "some/tiny", **offline)
    assert len(server.requests) == before


@pytest.mark.parametrize("missing", [SHARDS[0], "model.safetensors.index.json"])
def test_half_a_copy_does_not_pass_for_one(client: Client, missing: str) -> None:
    folder = client.resolve("some/tiny")
    (folder / missing).unlink()
    assert "HF_HUB_OFFLINE" in client.refusal("DownloadFailed", "resolve", "some/tiny", HF_HUB_OFFLINE="1")
    assert client.resolve(f"some/tiny@{folder.name}") == folder
    assert (folder / missing).is_file()


def test_no_network(client: Client) -> None:
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    assert "check the connection" in client.refusal("DownloadFailed", "resolve", "some/tiny", **nowhere)
    folder = client.resolve("some/tiny")
    assert client.resolve("some/tiny", **nowhere) == folder
    assert client.stderr.startswith("some/tiny: the hub cannot be reached")


def test_no_network_for_a_single_file(client: Client) -> None:
    """It was looked for during 24 s, and what was said then was not what was wrong."""
    line = client.refusal("DownloadFailed", "resolve", "stories15M", HF_ENDPOINT="http://127.0.0.1:9")
    assert "refused" in line
    assert "locate the file" not in line


def test_the_hub_is_broken(client: Client, server: Hub) -> None:
    server.broken = True
    assert "answered 500" in client.refusal("DownloadFailed", "resolve", "some/tiny")


def test_wrong_bytes_are_thrown_away(client: Client, server: Hub) -> None:
    server.lie_about.add(SHARDS[0])
    line = client.refusal("DownloadFailed", "resolve", "some/tiny")
    assert f"{SHARDS[0]} has the wrong hash" in line
    server.lie_about.clear()
    folder = client.resolve("some/tiny")
    assert (folder / SHARDS[0]).read_bytes() == tiny_files()[SHARDS[0]]
    assert half_written(client.folder) == []


@pytest.mark.parametrize("file", [SHARDS[0], "config.json"])  # known by sha256, and by git's sha1
def test_pull_verifies_what_is_there(client: Client, file: str) -> None:
    folder = client.resolve("some/tiny")
    assert client.call("pull", "some/tiny") == {"result": str(folder)}
    assert client.stderr == "some/tiny: already there, verified\n"
    data = bytearray((folder / file).read_bytes())
    data[-1] ^= 1
    (folder / file).write_bytes(data)
    assert client.resolve("some/tiny") == folder  # the inverse: without hashing nobody notices
    assert f"{file} has the wrong hash" in client.refusal("DownloadFailed", "pull", "some/tiny")
    assert client.call("pull", "some/tiny") == {"result": str(folder)}
    assert (folder / file).read_bytes() == tiny_files()[file]


@pytest.mark.parametrize("file", [SHARDS[0], "config.json"])
def test_a_copy_of_the_wrong_size_comes_anew(client: Client, file: str) -> None:
    folder = client.resolve("some/tiny")
    (folder / file).write_bytes((folder / file).read_bytes()[:-1])
    assert client.resolve("some/tiny") == folder
    assert (folder / file).read_bytes() == tiny_files()[file]


def test_too_little_space(client: Client, server: Hub) -> None:
    need = sum(len(data) for name, data in tiny_files().items() if name in WANTED)
    line = client.refusal("DownloadFailed", "resolve", "some/tiny", free=need - 1)
    assert "free disk space" in line
    assert not [r for r in server.requests if "/resolve/" in r.path]
    client.resolve("some/tiny", free=need)


def test_list_of_what_is_here(client: Client) -> None:
    known = [[m.name, None, m.nbytes] for m in names.MODELS.values()] + [[n, None, None] for n in names.REPOSITORIES]
    assert client.call("cached") == {"result": known}
    main, v1 = client.resolve("some/tiny"), client.resolve("some/tiny@v1")
    quant = client.resolve("some/quants:Q8_0")
    size = sum(len(data) for name, data in tiny_files().items() if name in WANTED)
    listed = client.call("cached")["result"]
    assert listed[: len(known)] == known
    assert sorted(listed[len(known) :]) == [
        ["some/quants:m-Q8_0.gguf", str(quant), 400],
        ["some/tiny", str(main), size],
        ["some/tiny@v1", str(v1), size],
    ]
    for name, path, _ in listed[len(known) :]:
        assert client.resolve(name, HF_HUB_OFFLINE="1") == Path(path)
    (main / SHARDS[0]).unlink()
    assert "some/tiny" not in [name for name, _, _ in client.call("cached")["result"]]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "the disk is full; make room, or set HF_HOME"),
        (PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/there"), "/there: Permission denied"),
        (RuntimeError("a transport's own\nand its second line"), "could not be downloaded (RuntimeError)"),
    ],
)
def test_errors_of_the_disk_and_the_transport(error: Exception, words: str) -> None:
    with pytest.raises(DownloadFailed) as caught, download._errors_in_one_line(Repository("a/b", "v1")):
        raise error
    assert str(caught.value).startswith("a/b@v1: " + words)
    assert "\n" not in str(caught.value)
