"""A spec's section ``compression``: how clients' changes are encoded on their way."""

from __future__ import annotations

from typing import Annotated, Literal

from promptfed.shared.spec.spec_section import Section, left_out


class CompressionSpec(Section):
    """The encoding of changes. The state itself is not rounded."""

    up: Annotated[
        Literal["none", "bf16", "int8"],
        left_out("none", description="bf16; int8: with a scale for each 1024 entries; both are rounded at random"),
    ] = "none"
