"""What the rounds of a federation add up to, for the card."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from promptfed.coordinator.problems import NoState
from promptfed.coordinator.resources.clients.views import client_view
from promptfed.coordinator.resources.results import exports, states
from promptfed.coordinator.resources.results.facts import Tally, _accuracies, _exported, _facts, known_of
from promptfed.coordinator.store import queries
from promptfed.coordinator.store.blobs import digest_of
from promptfed.shared.api import export_card
from promptfed.shared.api.api_schemas import SelectionView
from promptfed.shared.api.report_schemas import SpentPrivacy
from promptfed.shared.messages import Domain
from promptfed.shared.spec.spec import TEMPLATE
from promptfed.shared.tensors import encode
from tests.coordinator.resources.results.test_round_reports import evaluated, result
from tests.support.coordinators import InProcess
from tests.support.open_phases import completed


def spent(epsilon: float | None, replaced: float | None, ledger: float, z: float, delta: float, noise: str) -> Any:
    return SpentPrivacy.model_validate(
        {"epsilon": epsilon, "epsilon_replace_one": replaced, "ledger_epsilon": ledger, "noise_multiplier": z}
        | {"delta": delta, "noise": noise}
    )


A, B, C = spent(1, 7, 4, 2, 1e-3, "secret"), spent(3, 6, 5, 1, 1e-2, "seeded"), spent(2, 5, 3, 3, 1e-4, "secret")


def phase(*clients: str, state: str | None = None, **more: Any) -> Any:
    """What counts of a phase: updates of these clients, or a sum."""
    updates = more.pop("updates", {})
    counted = [SimpleNamespace(client=name) for name in clients]
    told = [SimpleNamespace(client=name, privacy=privacy) for name, privacy in updates.items()]
    return SimpleNamespace(
        **{"counted": counted, "updates": told, "state_hash": state, "privacy": None, "secure": None, "unreadable": []}
        | more
    )


def report(number: int, *phases: Any, evaluated: dict[str, int] | None = None) -> Any:
    evaluation = SimpleNamespace(clients=evaluated, unreadable=["x"]) if evaluated is not None else None
    stages = [*phases, *([evaluation] if evaluation is not None else [])]
    about = {"bytes_up": 10**number, "bytes_down": 2 * 10**number, "stages": stages}
    return SimpleNamespace(round=number, phases=list(phases), evaluation=evaluation, **about)


def view(unit: str = "record", secure: Any = None, clients: int | None = None, **privacy: Any) -> Any:
    rules = SimpleNamespace(clip=0.5, unit=unit, delta=1e-5, noise_multiplier=0.7, **privacy)
    spec = SimpleNamespace(privacy=rules, evaluations="noisy", secure_aggregation=secure)
    return SimpleNamespace(spec=spec, privacy=None if clients is None else SimpleNamespace(clients=clients))


def test_rounds_add_up() -> None:
    first, second = SimpleNamespace(epsilon=1), SimpleNamespace(epsilon=2)
    tally = Tally(
        [
            report(0, evaluated={"a": 1}),
            report(1, phase("a", "b", state="s1", privacy=first, unreadable=["u", "v"]), phase("a", privacy=second)),
            report(2, phase(), phase(state="s2"), evaluated={"b": 1}),
            report(3, phase("b"), evaluated={}),
        ]
    )
    assert (tally.up, tally.down, tally.rounds_counted, tally.states, tally.unreadable) == (1111, 2222, 2, 2, 5)
    assert tally.counted == {"a": 2, "b": 2}
    assert tally.central is second, "the last that a phase tells"
    assert tally.measured is not None
    assert tally.measured[0] == 2, "the last with an answer"
    assert tally.smallest_sum is None
    assert Tally().privacy(view(level="none")) is Tally().sums(view(level="none")) is None


@pytest.mark.parametrize(("sums", "smallest"), [([5, 3, 4], 3), ([None, 4, None, 6], 4), ([None], None)])
def test_the_smallest_sum_is_told(sums: list[int | None], smallest: int | None) -> None:
    told = [SimpleNamespace(sum_clients=size, privacy={"a": A} if size == 4 else None) for size in sums]
    tally = Tally([report(1, *(phase(secure=secure) for secure in told))])
    found = tally.sums(view(level="none", secure=SimpleNamespace(threshold=0.6)))
    assert found is not None
    assert (found.smallest_sum, found.threshold) == (smallest, 0.6)
    assert tally.spent == ({"a": A} if 4 in sums else {})


@pytest.mark.parametrize(
    ("last", "wanted"),
    [
        ({"a": A, "b": B}, (3, 2, 7, 5, 2, 1e-2, 1, "seeded")),
        ({"a": A, "b": C}, (2, 1.5, 7, 4, 2, 1e-3, 2, "secret")),
        ({"a": A, "b": B, "c": C}, (3, 2, 7, 5, 3, 1e-2, 1, "seeded")),
        ({"a": A, "b": spent(None, 9, 1, 2, 1e-3, "secret")}, (None, None, 9, 4, 2, 1e-3, 2, "secret")),
        ({"a": A, "b": spent(9, None, 1, 2, 1e-3, "secret")}, (9, 5, None, 4, 2, 1e-3, 2, "secret")),
        ({}, (None, None, None, None, 0, None, None, "secret")),
    ],
)
def test_the_cost_is_that_of_whom_it_cost_most_by_each_client_s_last_update(
    last: dict[str, SpentPrivacy], wanted: tuple[Any, ...]
) -> None:
    before = dict.fromkeys(last, spent(50, 50, 50, 0.1, 0.5, "seeded"))
    tally = Tally([report(1, phase("a", updates=before)), report(2, phase("a", updates={**last, "old": None}))])
    found = tally.privacy(view(level="sample", unit="group"))
    assert found is not None
    names = "epsilon_max epsilon_median epsilon_replace_one ledger_epsilon_max clients delta noise_multiplier noise"
    assert tuple(getattr(found, name) for name in names.split()) == wanted
    assert (found.level, found.unit, found.clip, found.rounds_counted) == ("sample", "group", 0.5, 2)
    assert (found.evaluation, found.epsilon_if_secret) == ("noisy", None)


@pytest.mark.parametrize(("clients", "told"), [(4, True), (None, False)])
def test_the_cost_of_noise_at_the_coordinator_is_that_of_the_last_state(clients: int | None, told: bool) -> None:
    about = SimpleNamespace(epsilon=1.5, epsilon_replace_one=2.5, epsilon_if_secret=0.5, noise="seeded")
    tally = Tally([report(1, phase("a", state="s", privacy=about if told else None))])
    found = tally.privacy(view(level="client", clients=clients))
    assert found is not None
    figures = (found.epsilon_max, found.epsilon_median, found.epsilon_replace_one, found.epsilon_if_secret, found.noise)
    assert figures == ((1.5, 1.5, 2.5, 0.5, "seeded") if told else (None, None, None, None, "central"))
    assert (found.level, found.unit, found.clip, found.clients) == ("client", "client", 0.5, clients or 0)
    assert (found.delta, found.noise_multiplier, found.rounds_counted) == (1e-5, 0.7, 1)


def test_an_export_has_the_last_state_beside_a_chosen_one_and_says_what_it_is_for(
    coordinator: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    id, _ = completed(coordinator, "a", "b", rounds=2)
    federation = coordinator.registry.get(id)
    known = known_of(coordinator.registry, federation, 1)
    chosen = SelectionView(round=1, value=0.5, compared=3)
    usual = [export_card.STATE_FILE, export_card.MARKDOWN_FILE, export_card.JSON_FILE]
    cases: Any = (
        ("finished", chosen, 2, True), ("failed", chosen, 2, False), ("finished", None, 2, False),
        ("finished", chosen, 1, False),
    )  # fmt: skip
    for state, selection, round, both in cases:
        view = known.view.model_copy(update={"state": state, "round": round})
        facts = known.facts.model_copy(update={"selection": selection})
        files = exports.made(replace(known, view=view, facts=facts), federation)
        assert sorted(files) == sorted([*usual, *([export_card.FINAL_FILE] if both else [])])
        card = export_card.Card.model_validate_json(bytes(files[export_card.JSON_FILE]))
        assert list(card.files) == sorted(files.keys() - {export_card.JSON_FILE})
        assert (card.use.open_clip, card.use.promptfed, card.use.why_not_open_clip) == (
            False,
            True,
            exports.NO_BACKBONE,
        )
        assert card.files[export_card.STATE_FILE] == known.state.file
        if both:
            assert card.files[export_card.FINAL_FILE] == known.final().file != known.state.file
    unnamed = replace(known, view=known.view.model_copy(update={"class_names": None}))
    for of, why in ((unnamed, None), (known, "it is personal")):
        monkeypatch.setattr(exports, "why_not_alone", lambda method, context, why=why: why)
        files = exports.made(of, federation)
        assert not export_card.Card.model_validate_json(bytes(files[export_card.JSON_FILE])).use.promptfed


def test_the_facts_are_of_the_rounds_until_the_result_s(coordinator: InProcess) -> None:
    id, _ = completed(coordinator, "b", "a", rounds=2, template="a sketch of a {}")
    registry = coordinator.registry
    known = known_of(registry, registry.get(id), 1)
    assert [one.updates_counted for one in known.facts.participants] == [1, 1]
    assert known.facts.template == "a sketch of a {}"
    assert known.facts.accuracy is not None
    assert [(row.client, row.split) for row in known.facts.accuracy.clients] == [("a", "test"), ("b", "test")]
    chosen = SelectionView(round=1, value=0.5, compared=3)
    with registry.database.read() as session:
        clients = [client_view(row) for row in session.scalars(queries.clients(id))]
    sketch, photo = (Domain(name=name, description=f"a {name} of a {{}}") for name in ("sketch", "photo"))
    domains = {"a": ("trainer", sketch), "b": ("evaluator", photo), "c": ("trainer", None)}
    clients = [
        clients[0].model_copy(update={"name": name, "role": role, "domain": domain})
        for name, (role, domain) in domains.items()
    ]
    view = known.view.model_copy(
        update={"selection": chosen, "spec": known.view.spec.model_copy(update={"template": None})}
    )
    for round, selected in ((1, chosen), (2, None)):
        facts = _facts(view, clients, Tally(), "sha256:state", round)
        assert (facts.selection, facts.accuracy, facts.template) == (selected, None, TEMPLATE)
        assert facts.domains == [sketch]
    none = view.model_copy(update={"selection": None})
    assert _facts(none, clients, Tally(), "sha256:state", 1).selection is None


def test_accuracies_are_in_order_of_client_and_split() -> None:
    splits = dict.fromkeys(["val", "test", "later", "early"], result(0.5))
    clients = {name: evaluated("trainer", splits, {"test": result(0.25)}) for name in ("c", "a", "b")}
    means = {"trainer": {"test": {"accuracy": 0.5, "zero_shot": 0.25}}, "evaluator": {"val": {"accuracy": 1.0}}}
    found = _accuracies(SimpleNamespace(measured=(3, SimpleNamespace(clients=clients, by_split=means))), "single_label")
    assert found is not None
    order = [(name, split) for name in "abc" for split in ("early", "later", "test", "val")]
    assert [(row.client, row.split) for row in found.clients] == order
    assert [row.zero_shot for row in found.clients[:4]] == [None, None, 0.25, None]
    assert (found.round, found.mean) == (3, {"trainer": {"adapted": 0.5, "zero_shot": 0.25}, "evaluator": {}})


@pytest.mark.parametrize("more", [{}, {"server.momentum": np.ones(2, np.float32)}])
def test_what_is_exported_is_the_method_s_part_of_a_state(more: dict[str, Any], tmp_path: Path) -> None:
    """The stored bytes where it is all of them."""
    own = {"context": np.ones((4, 8), np.float32)}
    content = encode(own | more)
    path = tmp_path / "state"
    path.write_bytes(content)
    row: Any = SimpleNamespace(sha256=digest_of(content))
    for place in (content, path):
        registry: Any = SimpleNamespace(blobs=SimpleNamespace(place=lambda digest, place=place: place))
        found = _exported(registry, row)
        assert list(found.state) == ["context"]
        assert found.body == (encode(own) if more else place)
        body = encode(own) if more else content
        assert (found.file.bytes, f"sha256:{found.file.sha256}") == (len(body), digest_of(body))


@pytest.mark.parametrize(
    ("at", "steps", "step", "round", "there"),
    [
        (2, 1, 1, 2, True), (2, 1, 0, 2, False), (2, 2, 1, 2, False), (2, 2, 3, 2, True), (2, 2, 0, 1, True),
        (2, 2, 2, 3, False), (0, 1, 0, 0, True), (2, 2, 0, None, True),
    ],
)  # fmt: skip
def test_a_state_is_there_once_the_phases_of_its_round_are_over_and_while_it_is_kept(
    at: int, steps: int, step: int, round: int | None, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation: Any = SimpleNamespace(
        name="eyes", run=SimpleNamespace(round=at, step=step), spec=SimpleNamespace(retention="all"),
        rules=SimpleNamespace(phases=lambda round: (None,) * steps),
    )  # fmt: skip
    session: Any = None
    for row, words in (
        (SimpleNamespace(stored=True), None),
        (SimpleNamespace(stored=False), "is no longer kept"),
        (None, "no state yet"),
    ):
        monkeypatch.setattr(states, "last_state", lambda *about, row=row: row)
        if there and words is None:
            assert states.state_of(session, federation, round) is row
        else:
            with pytest.raises(NoState, match=words if there else f"round {round} is not over: eyes is in round {at}"):
                states.state_of(session, federation, round)
