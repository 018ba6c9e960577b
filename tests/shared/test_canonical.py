"""One text for one value, and nothing that readers could take for two."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from promptfed.shared.api.api_schemas import FederationView, TokenRequest
from promptfed.shared.api.export_card import GONE, OF_TOWERS, _of_today
from promptfed.shared.api.report_schemas import ClientEvaluation, Reached, noise_of
from promptfed.shared.canonical import canonical_json, each_key_once, export_statement, is_signed, parse_json, statement
from promptfed.shared.errors import offences
from promptfed.shared.messages import SplitResult
from promptfed.shared.metrics.estimates import Estimate, interval_text
from promptfed.shared.service.addresses import address_parts
from promptfed.shared.spec.sections import best, without_rise


@pytest.mark.parametrize(("text", "found"), [
    (b'{"a": [1, 2.5, null]}', {"a": [1, 2.5, None]}), (b"NaN", "it holds NaN"), (b"[-Infinity]", "it holds -Infinity"),
    (b'{"a": {"c": 2, "b": 1, "b": 3}}', "it has the key 'b' twice"), (b"\xff", "codec can't decode"),
    (b"[" * 100_000, "it is nested too deeply"), (b"{", "Expecting property name"),
])  # fmt: skip
def test_json_has_one_meaning(text: bytes, found: Any) -> None:
    if isinstance(found, str):
        with pytest.raises(ValueError, match=found):
            parse_json(text)
    else:
        assert parse_json(text) == found


def test_what_is_signed_is_one_text() -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    assert canonical_json({"b": [1, "é"], "a": None}) == '{"a":null,"b":[1,"é"]}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json(float("inf"))
    said = statement("fed", 3, "sha256:1")
    assert said == b'promptfed state 1\n{"federation":"fed","round":3,"state_hash":"sha256:1"}'
    assert export_statement(b"{}") == b"promptfed export 1\n{}"
    key = Ed25519PrivateKey.generate()
    public, signature = key.public_key().public_bytes_raw().hex(), key.sign(said).hex()
    assert is_signed(public, signature, said)
    assert not any(is_signed(*given) for given in (
        (public, signature, said + b" "), ("no key", signature, said), (public, "00", said), ("00", signature, said)
    ))  # fmt: skip
    with pytest.raises(ValueError, match=f"the key '{'x' * 100}' twice"):
        each_key_once([("x" * 200, 1), ("y", 2), ("x" * 200, 3)])


def test_several_offences_have_a_heading() -> None:
    one, two = {"path": "a", "detail": "is missing"}, {"path": "b", "detail": "is 3"}
    assert offences([one]) == "a: is missing"
    assert offences([one, two]) == "2 things are wrong:\n  a: is missing\n  b: is 3"


@pytest.mark.parametrize(("address", "sound"), [
    ("http://a", True), ("https://a:1", True), ("http://[::1]:8080", True), ("http://a:0", False), ("ftp://a", False),
    ("http://", False), ("http://a:65536", False), ("http://[a", False), ("http://a b", False), ("http://a\n", False),
])  # fmt: skip
def test_an_address_has_a_host_and_a_port_that_there_is(address: str, sound: bool) -> None:
    if sound:
        assert address_parts(address).geturl() == address
    else:
        with pytest.raises(ValueError, match="is not an address: write http://host:port or https://host"):
            address_parts(address)


def test_requests_and_figures_without_a_value() -> None:
    assert TokenRequest(address=None, client="a").address is None
    assert TokenRequest(address="http://a").address == "http://a"
    for wrong in ({"address": "a"}, {"client": "a", "uses": 2}):
        with pytest.raises(ValidationError):
            TokenRequest.model_validate(wrong)
    assert interval_text(None) == "-"
    assert interval_text(Estimate(value=0.8125, low=0.76, high=0.855)) == "81.2 [76.0, 85.5]"
    assert noise_of(0.5, [Reached(0.5, 0.5, 0)]) == 1.0
    even = noise_of(0.5, [Reached(0.5, 0.5, 100), Reached(0.5, 0.5, 100), Reached(0.5, 0.5, 0)])
    assert even == pytest.approx(1.96 * (2 * 0.25 / 100) ** 0.5 / 2)
    assert 0 < noise_of(1.0, [Reached(1.0, 1.0, 10)]) == pytest.approx(1.96 * (12 / 14 * 2 / 14 / 10) ** 0.5)
    assert noise_of(0.5, [Reached(0.5, 0.5, 100, 0.1)]) == pytest.approx(1.96 * (0.0025 + 0.02) ** 0.5)


def test_an_interval_is_of_right_answers_alone() -> None:
    def interval(images: int, task: str | None = None, privacy: Any = None) -> Any:
        of = {"test": SplitResult(accuracy=0.8, num_samples=images)}
        return ClientEvaluation.model_construct(splits=of, zero_shot={}, privacy=privacy).interval("test", task)

    low, high = interval(50)
    assert 0.6 < low < 0.8 < high < 0.9
    assert interval(50, "multi_label") is interval(50, None, object()) is None


@pytest.mark.parametrize(("state", "reason", "why"), [
    ("finished", "privacy_budget", "its privacy budget is spent"), ("finished", "no rise", "no rise"),
    ("finished", None, None), ("failed", "privacy_budget", None),
])  # fmt: skip
def test_why_a_federation_ended_early_is_in_words(state: str, reason: str | None, why: str | None) -> None:
    assert FederationView.model_construct(state=state, reason=reason).ended_early == why


def test_what_an_earlier_version_wrote_is_left_out_at_its_default() -> None:
    name, gone = next((name, gone) for name, gone in GONE.items() if gone)
    method = {"name": name, "m": 4, "statistics": {}, **OF_TOWERS, **gone}
    assert _of_today(method) == {"name": name, "m": 4}
    key = next(iter(gone))
    assert _of_today(method | {key: "another"}) == {"name": name, "m": 4, key: "another"}


@pytest.mark.parametrize(("means", "first", "after"), [
    ({}, None, 0), ({3: 0.5}, 3, 0), ({1: 0.5, 2: 0.6, 3: 0.6}, 2, 1), ({1: 0.9, 2: 0.1, 4: 0.2}, 1, 2),
    ({4: 0.9, 2: 0.9, 1: 0.3}, 2, 1),
])  # fmt: skip
def test_the_best_round_is_the_first_with_the_highest_mean(
    means: dict[int, float], first: int | None, after: int
) -> None:
    assert (best(means), without_rise(means)) == (first, after)
