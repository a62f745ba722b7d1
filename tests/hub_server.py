"""A small Hugging Face hub on loopback: as much of its protocol as huggingface_hub needs to download a model, or to
upload one: a repository made, files known by their SHA-256 sent apart, and one commit of all.

Large files answer, as on the real hub, with a redirect to another host that must not see the token; here that host is
`localhost` while the hub itself is 127.0.0.1. Every request is recorded.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_tests"


@dataclass
class Repo:
    """`history`: file contents by revision name ("main", tags), each of which is one commit of its own."""

    history: dict[str, dict[str, bytes]]
    private: bool = False  # not even visible without a token
    gated: bool = False  # visible, but its files need a token

    def commit(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        for name, files in self.history.items():
            sha = hashlib.sha1(name.encode() + b"".join(sorted(files.values()))).hexdigest()
            if revision in (name, sha):
                return sha, files
        return None


@dataclass
class Request:
    method: str
    path: str
    range: str | None
    token: bool


@dataclass
class Hub:
    url: str
    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    cut_after: dict[str, int] = field(default_factory=dict)  # file name -> bytes after which its next GET breaks off
    lie_about: set[str] = field(default_factory=set)  # files whose bytes come wrong, at the right length
    broken: bool = False  # answers 500 to everything
    refuses: int | None = None  # the status that every upload is answered with
    objects: dict[str, bytes] = field(default_factory=dict)  # that were sent apart, by their SHA-256
    messages: list[str] = field(default_factory=list)  # of commits

    def seen(self, method: str, ending: str) -> list[Request]:
        return [r for r in self.requests if r.method == method and r.path.endswith(ending)]


@contextmanager
def serve(repos: dict[str, Repo]) -> Iterator[Hub]:
    server = _Server(("127.0.0.1", 0), _Handler)
    server.hub = Hub(f"http://127.0.0.1:{server.server_port}", repos)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server.hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def is_large(path: str) -> bool:
    """What the hub keeps in LFS."""
    return path.endswith((".safetensors", ".gguf", ".pth", ".bin"))


def _git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    hub: Hub

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that are killed close their sockets in the middle; that is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._take()

    def do_PUT(self) -> None:
        self._take()

    def _take(self) -> None:
        """What an upload consists of."""
        hub, path = self.server.hub, unquote(urlsplit(self.path).path)
        token, body = self.headers.get("Authorization"), self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.requests.append(Request(self.command, path, None, token is not None))
        if self.command == "PUT" and path.startswith("/lfs/"):  # the other host
            hub.objects[path.removeprefix("/lfs/")] = body
            return self._send_json({})
        if hub.refuses or hub.broken or token != f"Bearer {TOKEN}":
            return self._refuse(hub.refuses or (500 if hub.broken else 401), None)
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            status = 409 if name in hub.repos else 200
            hub.repos.setdefault(
                name, Repo({"main": {}}, private=asked.get("visibility") == "private" or bool(asked.get("private")))
            )
            return self._send_json({"url": f"{hub.url}/{name}", "id": name}, status)
        if path == "/api/validate-yaml":  # of a card
            return self._send_json({"errors": [], "warnings": []})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/(.+)", path):
            if match[2] not in hub.repos[match[1]].history:
                return self._refuse(404, "RevisionNotFound")
            listed = [one["path"] for one in json.loads(body)["files"]]
            modes = [
                {"path": one, "uploadMode": "lfs" if is_large(one) else "regular", "shouldIgnore": False}
                for one in listed
            ]
            return self._send_json({"files": modes})
        if re.fullmatch(r"/[^/]+/[^/]+\.git/info/lfs/objects/batch", path):
            other = f"http://localhost:{self.server.server_port}/lfs/"
            objects = [
                {**one, "actions": {"upload": {"href": other + one["oid"], "header": {}}}}
                for one in json.loads(body)["objects"]
            ]
            return self._send_json({"transfer": "basic", "objects": objects})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/(.+)", path):
            return self._commit(hub.repos[match[1]].history[match[2]], match[1], body)
        return self._refuse(404, None)

    def _commit(self, files: dict[str, bytes], name: str, body: bytes) -> None:
        hub = self.server.hub
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                hub.messages.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = hub.objects[value["oid"]]
        oid = "c" * 40
        self._send_json({"success": True, "commitOid": oid, "commitUrl": f"{hub.url}/{name}/commit/{oid}"})

    def _answer(self) -> None:
        hub = self.server.hub
        path = unquote(urlsplit(self.path).path)
        token = self.headers.get("Authorization")
        hub.requests.append(Request(self.command, path, self.headers.get("Range"), token is not None))
        if hub.broken:
            return self._refuse(500, None)
        if match := re.fullmatch(r"/blob/([^/]+/[^/]+)/([^/]+)/(.+)", path):
            return self._send_file(*match.groups())
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path)
        resolve = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        match = api or resolve
        repo = hub.repos.get(match[1]) if match else None
        allowed = token == f"Bearer {TOKEN}"
        if match is None or repo is None or (repo.private and not allowed):
            return self._refuse(401 if match else 404, "RepoNotFound" if match else None)
        commit = repo.commit((api[3] if api else match[2]) or "main")
        if commit is None:
            return self._refuse(404, "RevisionNotFound")
        if api:
            return self._send_json(_tree(commit[1]) if api[2] == "tree" else _info(match[1], *commit))
        if repo.gated and not allowed:
            return self._refuse(401, "GatedRepo")
        if match[3] not in commit[1]:
            return self._refuse(404, "EntryNotFound")
        if is_large(match[3]):
            return self._redirect(match[1], *commit, match[3])
        return self._send_file(match[1], commit[0], match[3])

    def _refuse(self, status: int, code: str | None) -> None:
        why = {"X-Error-Message": "The card's metadata is wrong."} if status == 400 else {}
        self._send(status, b"", why | ({"X-Error-Code": code} if code else {}))

    def _send_json(self, value: Any, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _redirect(self, repo: str, sha: str, files: dict[str, bytes], path: str) -> None:
        data = files[path]
        linked = {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"'}
        location = f"http://localhost:{self.server.server_port}/blob/{repo}/{sha}/{path}"
        self._send(302, b"", {"Location": location, "X-Repo-Commit": sha, **linked})

    def _send_file(self, repo: str, sha: str, path: str) -> None:
        commit = self.server.hub.repos[repo].commit(sha)
        assert commit
        data = whole = commit[1][path]
        if path in self.server.hub.lie_about:
            data = whole = bytes(len(data))
        headers = {"X-Repo-Commit": sha, "ETag": f'"{_git_sha1(data)}"', "Accept-Ranges": "bytes"}
        status = 200
        if wanted := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or ""):
            status, start = 206, int(wanted[1])
            data = whole[start:]
            headers["Content-Range"] = f"bytes {start}-{len(whole) - 1}/{len(whole)}"
        cut = self.server.hub.cut_after.pop(path, None) if self.command == "GET" else None
        self._send(status, data, headers, cut)

    def _send(self, status: int, body: bytes, headers: dict[str, str], cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True


def _info(repo: str, sha: str, files: dict[str, bytes]) -> dict[str, Any]:
    siblings = []
    for path, data in files.items():
        sibling: dict[str, Any] = {"rfilename": path, "size": len(data), "blobId": _git_sha1(data)}
        if is_large(path):
            sibling["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        siblings.append(sibling)
    return {"id": repo, "sha": sha, "private": False, "tags": [], "downloads": 0, "likes": 0, "siblings": siblings}


def _tree(files: dict[str, bytes]) -> list[dict[str, Any]]:
    entries = []
    for path, data in files.items():
        entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": _git_sha1(data)}
        if is_large(path):
            entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        entries.append(entry)
    return entries
