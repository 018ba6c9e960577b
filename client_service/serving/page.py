"""The page on which images are tried."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Response

from promptfed.client_service.serving.problems import ApiProblem
from promptfed.shared.service.static_page import StaticPage

# `blob:` is the chosen image, shown from the browser's memory.
PAGE = StaticPage("promptfed.client_service.serving", images="blob:")
# Files of a page are no calls that a program makes.
router = APIRouter(include_in_schema=False)


@router.get("/")
async def page(if_none_match: Annotated[str | None, Header()] = None) -> Response:
    """The upload page."""
    return PAGE.answer("index.html", if_none_match)


@router.get("/web/{file}")
async def page_file(file: str, if_none_match: Annotated[str | None, Header()] = None) -> Response:
    """A style sheet or script of the page."""
    try:
        return PAGE.answer(file, if_none_match)
    except KeyError:
        raise ApiProblem(404, "not-found", "Not found", "the page has no such file") from None
