"""A spec's section ``compression``: how clients' changes and their payloads are encoded on their way."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator

from promptfed.shared.spec.spec_section import Section, left_out

_TOPK = re.compile(r"topk\((0?\.[0-9]{1,6}|1(?:\.0*)?)\)")


def _known(text: str) -> str:
    share = _TOPK.fullmatch(text)
    if text not in ("none", "bf16", "int8") and (share is None or float(share[1]) == 0):
        raise ValueError("must be none, bf16, int8 or topk(SHARE), such as topk(0.01)")
    return text


class CompressionSpec(Section):
    """The encoding of changes (up) and of payloads (down).

    What rounding and leaving out lose of a change is added to the client's next one. The state itself is not rounded.
    """

    up: Annotated[
        str,
        AfterValidator(_known),
        left_out(
            "none",
            description="bf16; int8: with a scale for each 1024 entries, rounded at random; topk(SHARE): the largest "
            "entries of each tensor",
        ),
    ] = "none"
    down: Annotated[
        Literal["none", "bf16", "delta"],
        left_out(
            "none",
            description="bf16: clients train and are tested from rounded tensors; delta: the difference to the last "
            "payload that the client has, without loss",
        ),
    ] = "none"
