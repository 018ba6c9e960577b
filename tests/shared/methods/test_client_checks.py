"""What a spec may ask for at level client: filled in, or refused by name with the numbers that make it so."""

from __future__ import annotations

from typing import Any

import pytest

from promptfed.shared.methods import method_for, resolve_spec
from promptfed.shared.methods.core.checks import (
    allowed_rounds,
    check_clients,
    check_hopeless,
    costs,
    expected_clients,
    spent,
)
from promptfed.shared.methods.core.interface import MethodError, ServerContext
from promptfed.shared.privacy.accounting import Event, epsilon_of, replace_one_epsilon
from promptfed.shared.spec.spec import BackboneShape, FederationSpec, SpecError

PRIVACY = {"level": "client", "clip": 0.5, "noise_multiplier": 1.0}


def spec(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "name": "eyes",
        "method": {"name": "promptfl", "m": 4},
        "rounds": 3,
        "participation": {"min_clients": 50},
        "aggregation": {"weighting": "uniform"},
        "privacy": PRIVACY,
    }
    return base | changes


def refused(**changes: Any) -> list[dict[str, str]]:
    with pytest.raises(SpecError) as error:
        resolve_spec(spec(**changes))
    return error.value.errors


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": {"name": "plan"}}, "plan does not combine its updates by a mean in its phase"),
        ({"method": {"name": "zero_shot"}}, "zero_shot sends nothing up: there is nothing to protect"),
        ({"method": {"name": "pfedpg"}}, "pfedpg does not combine its updates by a mean"),
        ({"privacy": {"level": "client", "noise_multiplier": 1.0}}, "give clip, the longest that one client's change"),
        ({"privacy": {"level": "client", "clip": 0.5}}, "give noise_multiplier, or epsilon"),
        ({"aggregation": {"weighting": "samples"}}, "take aggregation.weighting uniform"),
        ({"aggregation": {"weighting": "uniform", "max_weight_share": 0.5}}, "max_weight_share 1"),
        ({"aggregation": {"rule": "median"}}, "take rule mean, no clip_norm"),
        ({"aggregation": {"weighting": "uniform", "clip_norm": 1.0}}, "take rule mean, no clip_norm"),
        ({"privacy": PRIVACY | {"unit": "group"}}, "a whole client is protected here"),
    ],
)
def test_what_cannot_be_protected_so_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    assert any(said in error["detail"] for error in refused(**changes) if error["path"] == "privacy")


def test_poisson_sampling_is_for_this_level_alone() -> None:
    told = refused(privacy={"level": "none"}, participation={"min_clients": 2, "sampling": "poisson"})
    assert told == [
        {
            "path": "privacy",
            "detail": "sampling poisson is for privacy.level client: leave it out",
        }
    ]


def test_delta_and_noise_are_filled_in_once_and_stay() -> None:
    poisson = {"min_clients": 100, "sampling": "poisson", "fraction": 0.2}
    found = resolve_spec(spec(privacy={"level": "client", "clip": 0.5, "epsilon": 6.0}, participation=poisson))
    assert found.privacy.delta == 1e-3
    assert found.privacy.noise_multiplier is not None
    assert spent(found, 3) <= 6.0
    told = costs(found, 3)
    assert told["epsilon"] == spent(found, 3), "of who knows the rounds: a secret sample lowers nothing"
    z = found.privacy.noise_multiplier
    assert told["epsilon"] == epsilon_of([Event("gaussian", 1.0, z, 3)], 1e-3)
    assert told["epsilon_if_secret"] == epsilon_of([Event("gaussian", 0.2, z, 3)], 1e-3)
    assert told["epsilon_replace_one"] == replace_one_epsilon([Event("gaussian", 1.0, z, 3)], 1e-3)
    quieter = found.model_copy(
        update={"privacy": found.privacy.model_copy(update={"noise_multiplier": found.privacy.noise_multiplier - 0.01})}
    )
    assert spent(quieter, 3) > 6.0, "it is the least noise there is"
    assert allowed_rounds(method_for(found), found) is None, "all rounds fit"
    again = resolve_spec(found.model_dump(mode="json"))
    assert again == found
    assert FederationSpec.model_validate(found.model_dump(mode="json")) == found


def test_a_delta_that_publishes_one_client_whole_is_refused_at_creation_and_later() -> None:
    errors = refused(privacy=PRIVACY | {"delta": 0.05})
    assert [error["path"] for error in errors] == ["privacy.noise_multiplier"]
    assert "δ = 0.05 is not between 1e-10 and 1/50, the number of units" in errors[0]["detail"]
    found = resolve_spec(spec())
    check_clients(found, 999)
    with pytest.raises(MethodError, match=r"create the federation with a smaller privacy\.delta"):
        check_clients(found, 1001)


def test_noise_and_a_budget_end_the_rounds_in_time() -> None:
    found = resolve_spec(spec(rounds=20, privacy=PRIVACY | {"noise_multiplier": 4.0, "epsilon": 2.0}))
    allowed = allowed_rounds(method_for(found), found)
    assert allowed is not None
    assert spent(found, allowed) <= 2.0 < spent(found, allowed + 1)


def test_hopeless_noise_is_refused_with_its_numbers_unless_it_is_accepted() -> None:
    context = ServerContext(resolve_spec(spec()).training, BackboneShape(d_t=512, d_e=512), None, (), 0, 25)
    hopeless = spec(
        method={"name": "promptfl", "m": 16},
        rounds=25,
        participation={"min_clients": 10},
        privacy={"level": "client", "clip": 0.5, "noise_multiplier": 2.04},
    )
    found = resolve_spec(hopeless)
    method = method_for(found)
    with pytest.raises(MethodError, match=r"on 8,192 numbers over 10 expected clients is r = 18 .* ρ = 3\.7"):
        check_hopeless(method, found, context, 10)
    check_hopeless(method, found, context, 100)  # the same with a hundred
    accepted = resolve_spec(hopeless | {"privacy": hopeless["privacy"] | {"accept_noise": True}})
    check_hopeless(method, accepted, context, 10)


def test_who_is_expected() -> None:
    fixed = resolve_spec(spec(participation={"min_clients": 3, "fraction": 0.5}))
    assert [expected_clients(fixed, count) for count in (3, 11)] == [3.0, 6.0]
    poisson = resolve_spec(spec(participation={"min_clients": 50, "fraction": 0.3, "sampling": "poisson"}))
    assert expected_clients(poisson, 55) == pytest.approx(16.5)
