"""A spec's section ``compression``: how clients' changes are encoded on their way."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

from promptfed.shared.spec.spec_section import Section, left_out

_TOPK = re.compile(r"topk\((0?\.[0-9]{1,6}|1(?:\.0*)?)\)")


def _known(text: str) -> str:
    share = _TOPK.fullmatch(text)
    if text not in ("none", "bf16", "int8") and (share is None or float(share[1]) == 0):
        raise ValueError("must be none, bf16, int8 or topk(SHARE), such as topk(0.01)")
    return text


class CompressionSpec(Section):
    """The encoding of changes. What rounding and leaving out lose is added to the client's next change."""

    up: Annotated[
        str,
        AfterValidator(_known),
        left_out(
            "none",
            description="bf16; int8: with a scale for each 1024 entries, rounded at random; topk(SHARE): the largest "
            "entries of each tensor",
        ),
    ] = "none"
