# SPDX-License-Identifier: Apache-2.0
"""Web page of the server: static files that request nothing from other servers."""

from __future__ import annotations

from functools import partial
from importlib import resources

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

FILES = {"/": "index.html", "/page/page.css": "page.css", "/page/page.js": "page.js", "/page/icon.svg": "icon.svg"}
"""Files by path."""
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
"""Media types by ending."""
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""Headers of all files: the page loads its own script and style, reaches its own server, and cannot be framed."""


def add_page(app: Starlette) -> None:
    """Serve the page at `/`, and its files below `/page`."""
    for path, name in FILES.items():
        content = resources.files(__package__).joinpath("page", name).read_bytes()
        app.add_route(path, partial(_file, content, TYPES[name.rpartition(".")[2]]), methods=["GET"])


async def _file(content: bytes, media_type: str, request: Request) -> Response:
    del request
    return Response(content, headers=HEADERS, media_type=media_type)
