"""`/` of the admin listener: a page that shows the fleet. Owns its files, and what a browser lets
them do.

The page needs no key, as it shows nothing by itself: its script asks for `/admin/v1/live`, with the
key that the operator types. All paths in it are relative: it may stand behind a prefix.
"""

from __future__ import annotations

from importlib.resources import files

from fastapi import FastAPI
from fastapi.responses import Response

PAGE, FOLDER = "/", "/page/"
_KINDS = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
# Nothing of another host, no script or style within the page, and no text that becomes markup: what
# engines and clients say can only be shown as text.
_POLICY = (
    "default-src 'none'; connect-src 'self'; img-src 'self'; script-src 'self'; style-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "cache-control": "no-cache",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def is_page(path: str) -> bool:
    """Return whether a path is the page's, or that of one of its files."""
    return path == PAGE or path.startswith(FOLDER)


def add_page(app: FastAPI) -> None:
    """Add the page and its files."""
    folder = files("pdproxy.web.admin") / "page_files"
    _add(app, PAGE, (folder / "index.html").read_bytes(), "text/html")
    for file in folder.iterdir():
        if (kind := _KINDS.get(file.name.rpartition(".")[2])) is not None:
            _add(app, FOLDER + file.name, file.read_bytes(), kind)


def _add(app: FastAPI, path: str, content: bytes, kind: str) -> None:
    @app.get(path, include_in_schema=False)
    async def file() -> Response:
        return Response(content, headers=_HEADERS, media_type=kind)
