"""``/``: the operator's page. Its files need no token; its data come from the API with the operator's token."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Path, Response

from promptfed.coordinator.api.deps import RegistryOf, documented
from promptfed.coordinator.problems import NotFound
from promptfed.shared.service.static_page import MEDIA_TYPES, StaticPage

router = APIRouter(tags=["page"])

PAGE = StaticPage("promptfed.coordinator.api", images="'self'")
CONTENT: dict[str, dict[str, str]] = {kind.split(";")[0]: {} for kind in MEDIA_TYPES.values()}


@router.get(
    "/",
    response_class=Response,
    responses={
        200: {"content": {"text/html": {}}, "description": "the page"},
        304: {"description": "it is what If-None-Match names"},
        **documented(),
    },
)
async def get_page(registry: RegistryOf, if_none_match: Annotated[str | None, Header()] = None) -> Response:
    """The page on which operators watch and control federations."""
    others = registry.leases.addresses if registry.leases is not None else []
    return PAGE.answer("index.html", if_none_match, others)


@router.get(
    "/web/{file}",
    response_class=Response,
    responses={
        200: {"content": CONTENT, "description": "a file of the page"},
        304: {"description": "it is what If-None-Match names"},
        **documented(NotFound),
    },
)
async def get_file(
    file: Annotated[str, Path(max_length=100)], if_none_match: Annotated[str | None, Header()] = None
) -> Response:
    """A script, a style sheet, a picture or a licence of the page."""
    try:
        return PAGE.answer(file, if_none_match)
    except KeyError:
        raise NotFound(f"the page has no file {file[:100]!r}") from None
