"""``/docs``: the API's description in Swagger UI, whose files come with `fastapi-offline` and from nowhere else."""

from __future__ import annotations

import base64
import hashlib

from fastapi import APIRouter, FastAPI, Response
from starlette.staticfiles import StaticFiles

START = """SwaggerUIBundle({ url: "/openapi.json", dom_id: "#api", deepLinking: true, validatorUrl: null });"""
HTML = f"""<!doctype html>
<html lang="en">
  <head>
    <meta charset="utf-8">
    <meta name="viewport" content="width=device-width, initial-scale=1">
    <title>promptfed coordinator: API</title>
    <link rel="stylesheet" href="/docs/files/swagger-ui.css">
  </head>
  <body>
    <div id="api"></div>
    <script src="/docs/files/swagger-ui-bundle.js"></script>
    <script>{START}</script>
  </body>
</html>
"""
# Swagger UI sets styles by script and draws its icons from data URLs.
POLICY = "; ".join(
    (
        "default-src 'none'",
        f"script-src 'self' 'sha256-{base64.b64encode(hashlib.sha256(START.encode()).digest()).decode()}'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)

router = APIRouter(include_in_schema=False)


@router.get("/docs")
async def docs() -> Response:
    """The page; it needs no token, what it tries out does."""
    headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
    return Response(HTML, media_type="text/html; charset=utf-8", headers=headers)


def add_to(app: FastAPI) -> None:
    """Add the page and the files of Swagger UI."""
    app.include_router(router)
    app.mount("/docs/files", StaticFiles(packages=[("fastapi_offline", "static")]))
