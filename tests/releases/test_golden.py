"""Messages as earlier releases wrote them: they are read, and written again in the same bytes for those releases.

Each file in ``golden/`` was made by its release's own code: one example of each message, and the fields that it knows.
``kept`` lists the fields of what a client keeps on its disk.
"""

from __future__ import annotations

import json
import typing
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from promptfed.client_service.privacy.agreement import terms_of
from promptfed.shared import messages
from promptfed.shared.methods import make_method
from promptfed.shared.spec.spec_section import newest_needed
from promptfed.shared.spec.versions import RELEASES, Versions

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = {release: version for version, release in RELEASES.items()}
FILES = sorted(path.stem for path in GOLDEN.glob("*.json"))


def golden(release: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{release}.json").read_text())


def models_of(model: type[BaseModel], found: dict[str, type[BaseModel]]) -> dict[str, type[BaseModel]]:
    """A model and all models in its fields, by name."""

    def look(annotation: Any) -> None:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel) and annotation.__name__ not in found:
            models_of(annotation, found)
        for part in typing.get_args(annotation):
            look(part)

    found[model.__name__] = model
    for field in model.model_fields.values():
        look(field.annotation)
    return found


def test_there_is_one_of_each_earlier_release() -> None:
    assert sorted(RELEASES.values())[:-1] == FILES


@pytest.mark.parametrize("release", FILES)
def test_messages_of_a_release_are_read_and_written_as_they_were(release: str) -> None:
    for name, example in golden(release)["examples"].items():
        message = getattr(messages, name).model_validate(example)
        with Versions(1, VERSIONS[release]).addressed():
            assert message.model_dump(mode="json") == example


@pytest.mark.parametrize("release", FILES)
def test_a_field_that_a_release_does_not_know_says_since_when_it_is_there(release: str) -> None:
    """Give a new field ``left_out(since=...)``: an earlier release would refuse a message that has it."""
    known = golden(release)["fields"]
    models: dict[str, type[BaseModel]] = {}
    for name in golden(release)["examples"]:
        models_of(getattr(messages, name), models)
    for name in known.keys() & models.keys():
        for added in models[name].model_fields.keys() - set(known[name]):
            extra = models[name].model_fields[added].json_schema_extra
            assert isinstance(extra, dict), f"{name}.{added}"
            assert VERSIONS[str(extra["since"])] > VERSIONS[release], f"{name}.{added}"


@pytest.mark.parametrize("release", FILES)
def test_a_release_can_continue_with_what_the_owner_agreed_to(release: str) -> None:
    """A consent stays on the disk when a client is replaced by an earlier release, which refuses unknown keys."""
    info = messages.EnrolmentInfo.model_validate(golden(release)["examples"]["EnrolmentInfo"])
    terms = terms_of(info, make_method(info.method), "http://coordinator", "trainer", [])
    assert terms.model_dump(mode="json").keys() <= set(golden(release)["kept"]["AgreedTerms"])


def test_an_offer_with_a_later_field_needs_a_later_client() -> None:
    assert newest_needed(messages.EnrolmentInfo.model_validate(golden("0.1.0")["examples"]["EnrolmentInfo"]))[0] == 1
    assert newest_needed(messages.EnrolmentInfo.model_validate(golden("0.2.0")["examples"]["EnrolmentInfo"])) == (
        2,
        "loss",
    )
