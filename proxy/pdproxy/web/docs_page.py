"""`/docs`: the page that shows the OpenAPI document, without anything from another host.

FastAPI's own page loads its scripts from a public network. Here they come from the files of
fastapi-offline. Owns how they are sent: in pieces from memory, so that a client which does not read
holds neither an open file nor a copy of a script.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from importlib.resources import files

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse, Response, StreamingResponse

PATH = "/docs"
_FILES = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon.png": "image/png",
}
_PIECE = 16_384
"""Bytes that are written at a time."""
# A browser refuses everything that is not of this server, whatever the scripts try. They are part
# of the page or its files.
_POLICY = (
    "default-src 'none'; connect-src 'self'; img-src 'self' data:; script-src 'self' "
    "'unsafe-inline'; "
    "style-src 'self' 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def add_docs(app: FastAPI) -> None:
    """Add the page and its files."""
    page = get_swagger_ui_html(
        openapi_url=f"{app.root_path}{app.openapi_url}",
        title=f"{app.title}: routes",
        swagger_js_url=f"{app.root_path}{PATH}/swagger-ui-bundle.js",
        swagger_css_url=f"{app.root_path}{PATH}/swagger-ui.css",
        swagger_favicon_url=f"{app.root_path}{PATH}/favicon.png",
        # The validator is a public server.
        swagger_ui_parameters={"validatorUrl": None},
    )

    @app.get(PATH, include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(page.body, headers={"content-security-policy": _POLICY})

    folder = files("fastapi_offline") / "static"
    for name, kind in _FILES.items():
        _add_file(app, f"{PATH}/{name}", (folder / name).read_bytes(), kind)


def _add_file(app: FastAPI, path: str, content: bytes, kind: str) -> None:
    headers = {
        "content-length": str(len(content)),
        "cache-control": "max-age=3600",
        "x-content-type-options": "nosniff",
    }

    @app.get(path, include_in_schema=False)
    async def file() -> Response:
        return StreamingResponse(_pieces(content), headers=headers, media_type=kind)


async def _pieces(content: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(content), _PIECE):
        yield content[start : start + _PIECE]
        await asyncio.sleep(0)  # other clients come first; and a client that has left is noticed
