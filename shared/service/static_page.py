"""A service's page: the files in ``web/`` of its package, with security headers for browsers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import PurePath

from starlette.responses import Response

POLICY = "Content-Security-Policy"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}


@dataclass(frozen=True)
class PageFile:
    """A file as it is sent."""

    content: bytes
    media_type: str
    etag: str


class StaticPage:
    """The page of the service in ``package``.

    Args:
        package: the one whose folder ``web/`` holds the files.
        images: where pictures may come from, as a source of a Content-Security-Policy: ``'self'``, ``blob:``.
    """

    def __init__(self, package: str, images: str):
        self.headers = _headers(images)
        self._package = package

    @cached_property
    def files(self) -> dict[str, PageFile]:
        """The page's files by name: only these are served, whatever is asked for."""
        served = {}
        for entry in (files(self._package) / "web").iterdir():
            media_type = MEDIA_TYPES.get(PurePath(entry.name).suffix)
            if media_type is not None:
                content = entry.read_bytes()
                served[entry.name] = PageFile(content, media_type, f'"{hashlib.sha256(content).hexdigest()}"')
        return served

    def answer(self, name: str, if_none_match: str | None) -> Response:
        """The file, or 304 where ``if_none_match`` names it. Raises KeyError where there is none of this name."""
        file = self.files[name]
        headers = {**self.headers, "ETag": file.etag}
        if if_none_match is not None and file.etag in if_none_match:
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)


def _headers(images: str) -> dict[str, str]:
    """Headers of every file: only the page's own files and API may be used, and text never becomes HTML or script."""
    policy = (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        f"img-src {images}",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    return {
        POLICY: "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }
