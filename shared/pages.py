"""What the services' pages have in common: the media types of their files, and the headers that shut browsers in."""

from __future__ import annotations

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}


def page_headers(images: str) -> dict[str, str]:
    """Headers of every file of a page: its own files and the API beside it, and no text ever becomes HTML or script.

    Args:
        images: where pictures may come from, as a source of a Content-Security-Policy: ``'self'``, ``blob:``.
    """
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
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }
