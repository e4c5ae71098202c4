"""Serve the page at `/`: a chat that also shows the link, rounds and tokens.

The page consists of the files in `static/` only: it loads nothing from other hosts, has no inline
script or style, and makes no HTML of a model's text. The files are public. The page requests
`/v1/models`, `/v1/chat/completions` and `/status` with the user's API key.
"""

from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

_FOLDER = Path(__file__).parent / "static"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_NAMES = (
    *("index.html", "page.css", "answer.css", "icon.svg", "page.js", "panel.js", "service.js"),
    *("chat.js", "stream.js", "answer.js", "tokens.js", "bubble.js", "calls.js", "form.js"),
    *("code.js", "curl.js", "clipboard.js", "figures.js", "live.js", "options.js", "outage.js"),
    *("panel.css", "pictures.js", "store.js"),
)
# The page's headers, in addition to those of all responses.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class _PageFile(NamedTuple):
    """A file of the page, with its ETag."""

    content: bytes
    media_type: str
    tag: str


def _read(name: str) -> _PageFile:
    content = (_FOLDER / name).read_bytes()
    media_type = _TYPES[name.rpartition(".")[2]]
    return _PageFile(content, media_type, f'"{sha256(content).hexdigest()[:16]}"')


def _answer(file: _PageFile, request: Request) -> Response:
    headers = {**HEADERS, "ETag": file.tag}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)


_files = {name: _read(name) for name in _NAMES}


async def index(request: Request) -> Response:
    """Serve the page."""
    return _answer(_files["index.html"], request)


async def part(request: Request) -> Response:
    """Serve a script, the style or the icon of the page; 404 for other names."""
    file = _files.get(request.path_params["name"])
    if file is None:
        raise HTTPException(404)
    return _answer(file, request)


ROUTES = {"/": index, "/page/{name}": part}
