"""The page's files: which there are, how they are answered, and that they fetch nothing from elsewhere."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest
from served import Running

from pronk.serve import page
from pronk.serve.models import Models

FOLDER = Path(page.__file__).parent
OURS = [name for name in page.PATHS.values() if not name.startswith("vendor/")]
KINDS = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml", "md": "text/plain"}
SCRIPTS = [name for name in OURS if name.endswith(".js")]


def fetched(server: Running, path: str, **headers: str) -> tuple[int, Message, bytes]:
    method = headers.pop("method", "GET")
    request = urllib.request.Request(server.url + path, headers=headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(("path", "name"), page.PATHS.items())
def test_each_file_is_answered_with_its_type_and_the_policy(server: Running, path: str, name: str) -> None:
    status, headers, body = fetched(server, path)
    assert (status, body) == (200, (FOLDER / name).read_bytes())
    kinds = {
        "html": "text/html",
        "js": "text/javascript",
        "css": "text/css",
        "svg": "image/svg+xml",
        "md": "text/plain",
    }
    assert headers.get_content_type() == kinds[name.rpartition(".")[2]]
    policy = dict(part.strip().partition(" ")[::2] for part in headers["content-security-policy"].split(";"))
    assert policy == {
        "default-src": "'none'", "script-src": "'self'", "style-src": "'self'", "connect-src": "'self'",
        "img-src": "'self' data:", "base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'", "trusted-types": "'none'",
    }  # fmt: skip
    assert headers["x-content-type-options"] == "nosniff"
    assert fetched(server, path, **{"If-None-Match": headers["etag"]})[::2] == (304, b"")
    assert fetched(server, path, **{"If-None-Match": '"x"'})[0] == 200
    assert fetched(server, path, method="HEAD")[::2] == (200, b"")
    assert fetched(server, path, method="DELETE")[0] == 405


def test_the_list_is_the_folder() -> None:
    there = {str(file.relative_to(FOLDER).as_posix()) for file in FOLDER.rglob("*") if file.is_file()}
    python = {name for name in there if name.endswith((".py", ".pyc"))}
    assert there - python == set(page.PATHS.values())


@pytest.mark.parametrize(
    "path",
    [
        "/page", "/page/", "/page/index.html", "/page/__init__.py", "/page/../guard.py", "/page/%2e%2e/guard.py",
        "/page/vendor", "/page/vendor/", "/page//main.js", "/page/MAIN.js", "/page/..%2fguard.py",
        "/index.html", "/main.js", "/page/main.js%00", "/page/C:/x", "/favicon.ico",
    ],
)  # fmt: skip
def test_no_other_path_is_a_file(server: Running, path: str) -> None:
    assert fetched(server, path)[0] == 404


@pytest.mark.parametrize("name", OURS)
def test_nothing_is_asked_of_another_host(name: str) -> None:
    text = read(name).replace("http://www.w3.org/2000/svg", "")  # a name, that nobody fetches
    assert re.findall(r"(?:https?:|wss?:)?//(?![ *\n])[\w.-]+\.\w+", text) == []
    assert not re.search(
        r"@import|url\(|integrity|sendBeacon|new WebSocket|new EventSource|importScripts|serviceWorker", text
    )


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_text_is_made_html_or_run(name: str) -> None:
    """The browser refuses that as well; here it is seen without one."""
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc|\beval\b|new Function|\.cssText"
    )
    assert not re.search(forbidden, read(name))
    assert not re.search(r"setAttribute\(.(?:style|on)", read(name))


def test_what_is_forbidden_would_be_found() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("test_page.read", lambda name: "x.innerHTML = y; import 'https://cdn.example/x.js'")
        with pytest.raises(AssertionError):
            test_no_text_is_made_html_or_run("x.js")
        with pytest.raises(AssertionError):
            test_nothing_is_asked_of_another_host("x.js")


def test_the_page_has_no_script_or_style_of_its_own() -> None:
    html = read("index.html")
    assert re.findall(r"<script[^>]*>(.*?)</script>", html, re.DOTALL) == [""]
    assert not re.search(r"<style|\sstyle=|\son\w+=", html)
    assert set(re.findall(r'(?:src|href)="(/[^"]*)"', html)) <= page.PATHS.keys()


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_is_imported_is_there_and_used(name: str) -> None:
    text = read(name)
    imported = re.findall(r'^import (.+?) from "\./([\w./]+)";$', text, re.MULTILINE)
    assert len(imported) == len(re.findall(r"^import ", text, re.MULTILINE))
    for names, source in imported:
        exported = read(source)
        for one in re.findall(r"\w+", names.partition("* as ")[2] or names):
            assert len(re.findall(rf"\b{one}\b", text)) > 1, one
            if source.startswith("vendor/") or "* as" in names:
                continue
            assert re.search(rf"^export (?:async )?(?:function\*?|class|const) {one}\b", exported, re.MULTILINE), one


def test_what_others_wrote_is_named_with_version_and_licence() -> None:
    listed = read("vendor/README.md")
    for name in (name for name in page.PATHS.values() if name.endswith("marked.esm.js")):
        version = re.search(r"marked v([\d.]+)", read(name))
        assert version
        assert f"| {version[1]} |" in listed
    assert "Permission is hereby granted, free of charge" in read("vendor/marked.LICENSE.md")
    assert sum(file.stat().st_size for file in FOLDER.rglob("*") if file.suffix != ".pyc") < 200_000


def contrast(one: str, other: str) -> float:
    """As WCAG 2 has it: https://www.w3.org/TR/WCAG21/#dfn-contrast-ratio"""

    def luminance(colour: str) -> float:
        parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def mixed(one: str, other: str, share: float) -> str:
    parts = [(int(one[n : n + 2], 16), int(other[n : n + 2], 16)) for n in (1, 3, 5)]
    return "#" + "".join(f"{round(share * a + (1 - share) * b):02x}" for a, b in parts)


@pytest.mark.parametrize("scheme", [0, 1])
def test_letters_can_be_read_in_the_light_and_in_the_dark(scheme: int) -> None:
    blocks = re.findall(r":root \{(.*?)\}", read("base.css"), re.DOTALL)
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", blocks[scheme]))
    for letters in ("ink", "soft", "own", "bad"):
        for ground in ("paper", "raised", "sunk"):
            assert contrast(colours[letters], colours[ground]) >= 4.5, (letters, ground)
    assert contrast(colours["ink"], colours["own-pale"]) >= 4.5
    assert contrast(colours["on-own"], colours["own"]) >= 4.5
    shades = [int(share) / 100 for share in re.findall(r"var\(--hot\) (\d+)%", read("inside.css"))]
    assert len(shades) == 7
    for share in shades:
        for ground in ("paper", "raised", "sunk"):
            assert contrast(colours["ink"], mixed(colours["hot"], colours[ground], share)) >= 4.5, share
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


@pytest.fixture
def locked(folder: Path) -> Iterator[Running]:
    running = Running(Models({"tiny": str(folder)}, {}, {"threads": 1}), keys=("first",))
    yield running
    running.stop()


def test_the_page_alone_opens_without_a_key(locked: Running) -> None:
    assert {fetched(locked, path)[0] for path in page.PATHS} == {200}
    assert {fetched(locked, path)[0] for path in ("/v1/models", "/page/x", "/page", "/v1/look", "/metrics")} == {401}
