"""Guard: what is refused before anything of a request is read: other hosts' names, other sites' pages, wrong keys."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pronk.serve.failures import ApiError
from pronk.serve.http import Json

LOOPBACK = ("127.0.0.1", "localhost", "::1")
OPEN = ("/health",)  # what is answered without a key, beside the files of the page
_METHODS, _SENT = "GET, POST, OPTIONS", "authorization, content-type, x-api-key, anthropic-version"
# Of all that is answered: it is never a page of another's, and nothing in it is to be guessed at.
_SECURE = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True)
class Guard:
    """`hosts`: names that this server is called by. `origins`: of pages that may ask from elsewhere. `keys`: none, and
    everybody may ask; who may not is refused before the path is looked at, so that all paths are alike. `page`: paths
    that a browser fetches before anybody could type a key. `note` is told of what is refused, with the status.
    `at_all`: it listens at all addresses of a machine, which in digits are no name that could come to mean another."""

    app: ASGIApp
    hosts: Collection[str]
    origins: Collection[str] = ()
    keys: Sequence[str] = ()
    page: Collection[str] = ()
    note: Callable[[Scope, int], None] = lambda scope, status: None
    at_all: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        allowed = origin if origin in self.origins else None

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                found = MutableHeaders(scope=message)
                for name, value in _SECURE.items():
                    found.setdefault(name, value)
                if allowed:
                    found["access-control-allow-origin"] = allowed
                    found["vary"] = "origin"
            await send(message)

        try:
            self._check(scope, headers, origin)
            if scope["method"] == "OPTIONS" and allowed:
                preflight = {
                    "access-control-allow-methods": _METHODS,
                    "access-control-allow-headers": _SENT,
                    "access-control-max-age": "600",
                }
                await Json({}, headers=preflight)(scope, receive, answer)
                return
            scope["owner"] = self._owner(scope, headers)
        except ApiError as error:
            await Json(error.told(scope["path"]), error.status, error.headers)(scope, receive, answer)
            self.note(scope, error.status)
            return
        await self.app(scope, receive, answer)

    def _check(self, scope: Scope, headers: Headers, origin: str | None) -> None:
        close = {"Connection": "close"}
        if "content-length" in headers and "transfer-encoding" in headers:
            raise ApiError(400, "a request with two lengths is two requests to somebody; send one", headers=close)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._answers_to(_name(hosts[0])):
            said = hosts[0][:80] if hosts else "none"
            problem = f"this server does not answer to the host {said!r}; --allowed-host lets it"
            raise ApiError(403, problem, code="host_not_allowed", headers=close)
        if origin is not None and origin not in self.origins and not self._is_own(origin, hosts[0]):
            problem = f"pages of {origin[:80]!r} may not ask here; --allowed-origin lets them"
            raise ApiError(403, problem, code="origin_not_allowed")
        if (
            scope["method"] == "POST"
            and headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json"
        ):
            raise ApiError(415, "the header content-type must say application/json, of which the body is")

    def _answers_to(self, name: str) -> bool:
        return name in self.hosts or (self.at_all and _in_digits(name))

    def _is_own(self, origin: str, host: str) -> bool:
        """Whether it is this server's page that asks. Its host is one of ours: that was seen before."""
        try:
            return urlsplit(origin).netloc.lower() == host.lower()
        except ValueError:  # no address at all, such as http://[
            return False

    def _owner(self, scope: Scope, headers: Headers) -> int:
        """Which of the keys was given; 0 where there are none. All are compared, each in constant time."""
        if not self.keys or scope["path"] in (*OPEN, *self.page):
            return 0
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip(" \t") if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        sent = given.encode("latin-1")  # which headers are read as: the client's own bytes
        matches = [hmac.compare_digest(sent, key.encode()) for key in self.keys]
        if True not in matches:
            problem = "a key is wanted, as in Authorization: Bearer KEY" if not given else "the key is wrong"
            raise ApiError(401, problem, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return matches.index(True) + 1


def _in_digits(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name(host: str) -> str:
    """Of a Host header, without its port; brackets of IPv6 addresses go."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, _, port = host.partition(":")
    return name if port.isdigit() or not port else host
