"""The page at /: files of this folder, each named here, for a browser that asks no other host for anything."""

from __future__ import annotations

import hashlib
from importlib import resources

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pronk.serve.http import Json

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".md": "text/plain; charset=utf-8",
}
_NAMES = (
    "index.html", "icon.svg", "base.css", "chat.css", "inside.css",
    "main.js", "app.js", "api.js", "sse.js", "dom.js", "pacing.js", "store.js", "tree.js", "options.js", "export.js",
    "sidebar.js", "settings.js", "composer.js", "thread.js", "message.js", "answer.js", "flow.js", "markdown.js",
    "strip.js", "parting.js", "inside.js", "looks.js", "token.js", "attention.js", "lens.js", "prompt.js", "cost.js",
    "vendor/marked.esm.js", "vendor/marked.LICENSE.md", "vendor/README.md",
)  # fmt: skip
PATHS = {"/": "index.html", **{f"/page/{name}": name for name in _NAMES if name != "index.html"}}

# Of the page nothing is HTML that was a text before: with trusted types a browser refuses to make any.
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "cache-control": "no-cache",
}


class _File:
    """Read when it is first asked for, and again never."""

    def __init__(self, name: str) -> None:
        self._name, self._body, self._tag = name, b"", ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in ("GET", "HEAD"):
            said = {"error": {"message": "the page is read with GET", "type": "invalid_request_error"}}
            await Json(said, 405, {"Allow": "GET, HEAD"})(scope, receive, send)
            return
        if not self._tag:
            self._body = resources.files(__name__).joinpath(self._name).read_bytes()
            self._tag = f'"{hashlib.sha256(self._body).hexdigest()[:32]}"'
        known = dict(scope["headers"]).get(b"if-none-match", b"").decode("latin-1") == self._tag
        kind = _TYPES[self._name[self._name.rindex(".") :]]
        headers = {**_HEADERS, "content-type": kind, "etag": self._tag}
        if not known:
            headers["content-length"] = str(len(self._body))
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 304 if known else 200, "headers": raw})
        body = b"" if known or scope["method"] == "HEAD" else self._body
        await send({"type": "http.response.body", "body": body})


def routes() -> list[Route]:
    return [Route(path, _File(name)) for path, name in PATHS.items()]
