"""Pushing to a hub on loopback: what goes there, what stays here, and what is said where it does not work.

huggingface_hub reads its environment when it is imported, so that what talks to that hub is a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.numpy
from hub_server import TOKEN, Hub, Repo, serve
from tiny_folder import save_tiny_chat_model
from training_runs import QUICK, write_sums

from pronk.checkpoint.hub import upload
from pronk.errors import BadRequest, ModelNotFound

REPO = "some/new"


@pytest.fixture
def server() -> Iterator[Hub]:
    with serve({"some/there": Repo({"main": {"old.txt": b"stays"}, "dev": {}})}) as running:
        yield running


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=256)


def pronk(hub: Hub, home: Path, *arguments: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    own |= {
        "HF_ENDPOINT": hub.url, "HF_HOME": str(home / "hf"), "PRONK_HOME": str(home / "pronk"), "NO_PROXY": "*",
        "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "pronk", *map(str, arguments)]
    return subprocess.run(command, env=own | environ, capture_output=True, text=True, timeout=1200)


def test_a_model_goes_there_whole(server: Hub, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    for name in ("notes.txt", ".secret", "metrics.jsonl", "run.yaml"):
        (folder / name).write_text("mine")
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "model.safetensors").write_text("mine")
    done = pronk(server, tmp_path, "push", folder, REPO)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{server.url}/{REPO}/commit/{'c' * 40}\n"
    assert server.repos[REPO].private
    pushed = server.repos[REPO].history["main"]
    assert pushed == {path.name: path.read_bytes() for path in model.iterdir()}
    assert server.messages == ["pronk: model"]
    assert not [r for r in server.requests if r.method == "PUT" and r.token], "the token went to another host"


def test_public_branches_and_messages(server: Hub, model: Path, tmp_path: Path) -> None:
    assert pronk(server, tmp_path, "push", model, REPO, "--public").returncode == 0
    assert not server.repos[REPO].private
    done = pronk(server, tmp_path, "push", model, "some/there", "--revision", "dev", "--message", "Better.")
    assert done.returncode == 0, done.stderr
    assert server.repos["some/there"].history["main"] == {"old.txt": b"stays"}
    assert "config.json" in server.repos["some/there"].history["dev"]
    assert server.messages[-1] == "Better."
    done = pronk(server, tmp_path, "push", model, "some/there", "--revision", "none")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "pronk: some/there: has no branch of that name")


def test_a_dry_run_sends_nothing(server: Hub, model: Path, tmp_path: Path) -> None:
    done = pronk(server, tmp_path, "push", model, REPO, "--dry-run", HF_TOKEN="")
    assert {line.split()[0] for line in done.stdout.splitlines()} == {path.name for path in model.iterdir()}
    assert not server.requests


@pytest.mark.parametrize(
    ("environ", "refuses", "said"),
    [
        ({"HF_TOKEN": ""}, None, "pushing needs a token of the hub: set HF_TOKEN, or log in with: hf auth login"),
        ({"HF_HUB_OFFLINE": "1"}, None, "HF_HUB_OFFLINE is set, and nothing can be pushed; unset it"),
        ({"HF_TOKEN": "hf_wrong"}, None, "nothing was pushed; the hub answered 401: the token is not valid"),
        ({}, 403, "nothing was pushed; the hub answered 403: the token may not write there"),
        ({}, 400, "nothing was pushed; the hub answered 400: The card's metadata is wrong."),
        ({}, 503, "nothing was pushed; the hub answered 503: try again later"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, None, "could not be pushed"),
    ],
)
def test_what_goes_wrong_is_one_line(
    server: Hub, model: Path, tmp_path: Path, environ: dict[str, str], refuses: int | None, said: str
) -> None:
    server.refuses = refuses
    done = pronk(server, tmp_path, "push", model, REPO, **environ)
    assert done.returncode in (1, 2)
    lines = [line for line in done.stderr.splitlines() if not line.startswith(("uploading", "usage", "Usage"))]
    assert len(lines) == 1, done.stderr
    assert f"{REPO}: {said}" in lines[0]
    assert REPO not in server.repos


def test_a_run_pushes_what_it_made(server: Hub, model: Path, tmp_path: Path) -> None:
    data = write_sums(tmp_path / "sums.jsonl", lambda a, b: {"completion": f" {a + b}."})
    given = ["finetune", model, "--data", data, *QUICK, "--push-to-hub", REPO]
    done = pronk(server, tmp_path, *given, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert f"pushed to {server.url}/{REPO}/commit/" in done.stderr
    pushed = server.repos[REPO].history["main"]
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md", "tokenizer.json"} <= pushed.keys()
    assert not {"run.yaml", "metrics.jsonl", "curves.html"} & pushed.keys()
    assert safetensors.numpy.load(pushed["adapter_model.safetensors"])
    assert str(model.parent) in (tmp_path / "out" / "adapter_config.json").read_text()
    for name in ("README.md", "adapter_config.json"):
        assert not [folder for folder in (tmp_path, model.parent) if str(folder) in pushed[name].decode()]
    assert json.loads(pushed["adapter_config.json"])["base_model_name_or_path"] == model.name
    server.refuses = 403
    done = pronk(server, tmp_path, *given, "--public", "--out", tmp_path / "again")
    assert done.returncode == 1
    assert f"(the run is finished: pronk push {tmp_path / 'again'} {REPO} --public)" in done.stderr
    assert (tmp_path / "again" / "adapter_model.safetensors").exists()
    before = len(server.requests)
    done = pronk(server, tmp_path, *given, "--out", tmp_path / "third", HF_TOKEN="")
    assert (done.returncode, (tmp_path / "third").exists()) == (2, False), "told before it trains"
    assert len(server.requests) == before


def test_nothing_is_pushed_unasked(server: Hub, model: Path, tmp_path: Path) -> None:
    data = write_sums(tmp_path / "sums.jsonl", lambda a, b: {"completion": f" {a + b}."})
    done = pronk(server, tmp_path, "finetune", model, "--data", data, *QUICK, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert not [request for request in server.requests if request.method in ("POST", "PUT")]


def test_what_a_folder_of_a_full_run_and_a_file_give(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    (run / "checkpoints").mkdir()
    for name in ("README.md", "metrics.jsonl", "model/config.json", "model/model.safetensors", "model/x.pt"):
        (run / name).write_text(json.dumps(name))
    assert upload.files(run) == {
        "README.md": run / "README.md",
        "config.json": run / "model" / "config.json",
        "model.safetensors": run / "model" / "model.safetensors",
    }
    (tmp_path / "a.gguf").write_text("GGUF")
    assert upload.files(tmp_path / "a.gguf") == {"a.gguf": tmp_path / "a.gguf"}
    with pytest.raises(ModelNotFound, match="is neither a folder nor a GGUF file"):
        upload.files(run / "README.md")
    for folder in (run / "checkpoints", tmp_path / "nowhere"):
        with pytest.raises(ModelNotFound):
            upload.files(folder)


@pytest.mark.parametrize("name", ["mine", "a/b/c", "a b/c", "../c", "a/..", "/a", "a/b--c", "a/" + "b" * 97, "ä/b"])
def test_what_is_no_repository(name: str) -> None:
    with pytest.raises(BadRequest, match="no name of a repository"):
        upload.push("folder", name, dry_run=True)
