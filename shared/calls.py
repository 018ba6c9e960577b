"""What all who call a coordinator do alike: which address is asked, and what an answer is that is no success."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from pydantic import ValidationError

from promptfed.shared.messages import Problem
from promptfed.shared.service.addresses import Addresses
from promptfed.shared.service.digests import Damaged, is_proven

NOT_AS_SENT = ("digest-mismatch", "incomplete-body")  # refusals of what did not arrive as it was sent


@contextmanager
def asked(addresses: Addresses, passing: tuple[type[Exception], ...]) -> Iterator[str]:
    """The address to ask now. Behind one that fails by what may pass, the next one comes first."""
    address = addresses.current
    try:
        yield address
    except passing as error:
        addresses.failed = address
        if isinstance(error, (httpx.ConnectError, httpx.TimeoutException)):
            addresses.note_silent(address)
        addresses.move_on()
        raise


def read_answer(response: httpx.Response, content: bytes) -> tuple[bool, Problem | None]:
    """Whether an answer is proven to be what was sent, and the problem that it is if it is no success and can be read.

    Raises:
        Damaged: it is something else than was sent, or says that of the request.
    """
    proven, problem = is_proven(response.headers, content, response.status_code == httpx.codes.PARTIAL_CONTENT), None
    if not response.is_success:
        try:
            problem = Problem.model_validate_json(content)
        except ValidationError:
            return proven, None
        if problem.kind in NOT_AS_SENT:
            raise Damaged(f"a request arrived as something else: {one_line(problem.detail)}")
    return proven, problem


def one_line(text: object, length: int = 500) -> str:
    """The beginning of a text for a log or a message, since a server may send any characters."""
    printable = "".join(letter if letter.isprintable() else " " for letter in str(text)[: 4 * length])
    return " ".join(printable.split())[:length]
