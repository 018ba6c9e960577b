"""A federation that has forgotten a client: others go back to the private tensors of then, where these are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.joining.parts import Parts, PrivacyParts
from promptfed.client_service.privacy.ledger import Ledger
from promptfed.client_service.settings import make_settings
from promptfed.client_service.state.kept_rounds import go_back, keep_before, keep_round, select_round
from promptfed.client_service.state.private_state import PrivateState, TensorOrigin
from promptfed.client_service.worker import Worker
from promptfed.shared.clip import FeatureCache
from promptfed.shared.clip.loading import load_backbone
from promptfed.shared.privacy.noise import SeededNoise
from tests.support.coordinators import InThread, in_thread
from tests.support.fake_coordinator import NAMES, made_up_source

METHOD = {"name": "fedpgp", "m": 2}
SOURCES = {name: made_up_source(seed=number, count=8, names=NAMES) for number, name in enumerate(("a", "b", "quokka"))}


def train(state: PrivateState, round: int, keep: int, phase: str = "train") -> None:
    """An accepted update of a round, whose private tensor is the round's number."""
    private = {"v": torch.full((2,), float(round))}
    state.write_pending(b"update", private, TensorOrigin(f"task-{round}-{phase}", round, phase, "peers"))
    keep_before(state, round, keep)
    state.commit()


def value(state: PrivateState) -> float | None:
    private, _ = state.committed()
    return float(private["v"][0]) if private else None


@pytest.mark.parametrize(
    ("keep", "to", "found", "left"),
    [
        (9, 4, True, 3.0),
        (9, 3, True, 2.0),
        (9, 5, True, 3.0),  # it has not trained in round 4: those of round 3 are those of before round 5 too
        (9, 1, True, None),
        (0, 1, True, None),
        (0, 3, False, None),
        (2, 6, True, 5.0),
        (2, 3, False, None),
        (9, 8, True, 6.0),
    ],
)
def test_the_private_tensors_with_which_a_round_began(
    tmp_path: Path, keep: int, to: int, found: bool, left: float | None
) -> None:
    state = PrivateState(tmp_path / "state")
    state.commit_prepared({}, TensorOrigin(peers="peers"))
    for round in (1, 2, 3, 5, 6):
        train(state, round, keep)
        train(state, round, keep, "second phase")
    assert go_back(state, to) is found
    assert value(state) == left
    go_back(state, to)  # as after a kill
    assert value(state) == left
    assert [path for path in state.folder.glob("before-*") if int(path.stem.removeprefix("before-")) >= to] == []
    train(state, to, keep)
    go_back(state, to)
    assert value(state) == left
    state.close()


def test_a_selection_does_not_hide_what_a_later_round_began_with(tmp_path: Path) -> None:
    state = PrivateState(tmp_path / "state")
    for round in (1, 2, 3):
        train(state, round, 9)
        keep_round(state, round)
    select_round(state, 1)
    assert value(state) == 1.0
    assert go_back(state, 3)
    assert value(state) == 2.0
    state.close()


def test_the_round_before_training_can_be_selected(tmp_path: Path) -> None:
    """Its private tensors are none, and not those of the last round."""
    state = PrivateState(tmp_path / "state")
    keep_round(state, 0)
    train(state, 1, 0)
    keep_round(state, 1)
    assert value(state) == 1.0
    for _ in range(2):  # as after a kill
        select_round(state, 0)
        assert value(state) is None
    state.close()


@pytest.mark.parametrize(("selected", "left"), [(1, None), (2, 2.0), (3, 2.0), (4, 4.0)])
def test_who_was_away_in_the_selected_round_takes_what_it_had(
    tmp_path: Path, selected: int, left: float | None
) -> None:
    state = PrivateState(tmp_path / "state")
    for round in (2, 4):  # it joined late, and was away in round 3
        train(state, round, 0)
        keep_round(state, round)
    for _ in range(2):
        select_round(state, selected)
        assert value(state) == left
    state.close()


def test_a_kept_round_has_no_copy_of_what_compression_lost(tmp_path: Path) -> None:
    state = PrivateState(tmp_path / "state")
    lost = {"context": torch.ones(100_000)}
    state.write_pending(b"update", {"v": torch.ones(2)}, TensorOrigin("task", 1, "train", "peers"), lost)
    state.commit()
    keep_round(state, 1)
    assert (state.folder / "round-1.safetensors").stat().st_size < 1000
    select_round(state, 1)
    assert value(state) == 1.0
    assert torch.equal(state.residual()["context"], lost["context"])
    state.close()


async def played(
    server: InThread, folder: Path, names: tuple[str, ...], keep: int, forget: str | None, **changes: Any
) -> tuple[list[str], list[tuple[str, Mapping[str, Any]]], Ledger]:
    """A federation of real clients, the last of whom comes later and may be forgotten.

    Its hashes; the events and the ledger of client a.
    """
    spec = {
        "name": folder.name,
        "method": METHOD,
        "rounds": 6,
        "participation": {"min_clients": 2, "draw": "public"},
        "training": {"epochs": 1, "batch_size": 4, "learning_rate": 0.05},
        "evaluation": {"every": 3},
        "keep_rounds": keep,
        "template": "a photo of a {}.",
    } | changes
    ledgers = {name: Ledger(None) for name in names}
    id = server.post("/v1/federations", spec, status=201)["id"]
    token, told = server.token(id), list[tuple[str, Mapping[str, Any]]]()
    backbone, cache = load_backbone("promptfed-tiny", None), FeatureCache(folder / "features")
    with ThreadPoolExecutor(1) as executor:

        def start(name: str) -> asyncio.Task[Exit]:
            settings = make_settings(
                coordinator=server.url,
                federation=id,
                name=name,
                data="made-up",
                state_dir=folder / name,
                device="cpu",
                max_epsilon=1000,
            )
            privacy = PrivacyParts(noise=SeededNoise(7), ledger=ledgers[name])
            parts = Parts(backbone, SOURCES[name], features=cache, enrolment_token=token, privacy=privacy)
            hook = (lambda event, facts: told.append((event, facts))) if name == "a" else None
            return asyncio.ensure_future(Worker(settings, parts, executor=executor, hook=hook).run())

        first = [start(name) for name in names if name != "quokka"]
        await asyncio.to_thread(server.until, id, clients={"trainers": 2, "evaluators": 0, "withdrawn": 0})
        await asyncio.to_thread(server.post, f"{id}/start")
        if "quokka" in names:
            await asyncio.to_thread(server.until, id, round=2)
            await asyncio.to_thread(server.post, f"{id}/pause")
            late = start("quokka")
            await asyncio.to_thread(server.until, id, clients={"trainers": 3, "evaluators": 0, "withdrawn": 0})
            await asyncio.to_thread(server.post, f"{id}/resume")
            await asyncio.to_thread(server.until, id, round=5)
            if forget is not None:
                plan = (await asyncio.to_thread(server.get, f"{id}/clients/{forget}/forgetting"))["charges"]
                told.append(("charges", {one["client"]: one for one in plan}))
                await asyncio.to_thread(server.post, f"{id}/clients/{forget}/forgetting")
                with pytest.raises(ClientError):
                    await late
        assert set(await asyncio.gather(*first)) == {Exit.OK}
    hashes = [report["state_hash"] for report in server.get(f"{id}/rounds")["rounds"]]
    return hashes, told, ledgers["a"]


def test_a_personal_method_comes_to_the_same_state(tmp_path: Path) -> None:
    with in_thread(tmp_path / "data") as server:
        wanted, _, _ = asyncio.run(played(server, tmp_path / "without", ("a", "b"), 0, None))
        hashes, told, _ = asyncio.run(played(server, tmp_path / "kept", ("a", "b", "quokka"), 6, "quokka"))
        assert hashes == wanted
        [facts] = [facts for event, facts in told if event == "repeated"]
        assert (facts["first"], facts["anew"]) == (3, False)
        assert not any(event == "again" for event, _ in told)
        gone, told, _ = asyncio.run(played(server, tmp_path / "gone", ("a", "b", "quokka"), 0, "quokka"))
        assert [facts["anew"] for event, facts in told if event == "repeated"] == [True]
        assert gone != wanted


def test_what_compression_has_lost_goes_back_too(tmp_path: Path) -> None:
    """Error feedback keeps a tensor from round to round, of methods without private tensors too."""
    changes = {"method": {"name": "promptfl", "m": 2}, "compression": {"up": "topk(0.1)"}}
    with in_thread(tmp_path / "data") as server:
        wanted, _, _ = asyncio.run(played(server, tmp_path / "without", ("a", "b"), 0, None, **changes))
        for keep in (6, 0):
            name = f"kept-{keep}"
            hashes, told, _ = asyncio.run(
                played(server, tmp_path / name, ("a", "b", "quokka"), keep, "quokka", **changes)
            )
            assert (hashes == wanted) is (keep == 6)
            [charges] = [facts for event, facts in told if event == "charges"]
            assert charges["a"]["starts_anew"] is (keep == 0)
            assert [facts["anew"] for event, facts in told if event == "repeated"] == [keep == 0]


def test_ledgers_of_others_are_charged_for_repeated_rounds(tmp_path: Path) -> None:
    privacy = {"level": "sample", "clip": 1.0, "noise_multiplier": 2.0}
    changes = {"method": {"name": "promptfl", "m": 2}, "privacy": privacy}
    with in_thread(tmp_path / "data") as server:
        wanted, _, quiet = asyncio.run(played(server, tmp_path / "without", ("a", "b"), 0, None, **changes))
        hashes, told, ledger = asyncio.run(
            played(server, tmp_path / "forgotten", ("a", "b", "quokka"), 0, "quokka", **changes)
        )
    assert hashes == wanted
    assert len(quiet.spends()) == 6
    first = next(facts["first"] for event, facts in told if event == "repeated")
    rounds = [facts["round"] for event, facts in told if event == "accepted"]
    assert sorted(set(rounds)) == [1, 2, 3, 4, 5, 6]
    # One more may have been under way when the federation went back: it was paid for before it was sent.
    assert len(ledger.spends()) - len(rounds) in (0, 1)
    asked = next(number for number, (event, _) in enumerate(told) if event == "charges")
    before = sum(event == "accepted" and facts["round"] >= first for event, facts in told[:asked])
    charge = told[asked][1]["a"]
    assert before > 0
    assert charge["answers"] - before in (0, 1)
    assert 0 < charge["epsilon"] < ledger.epsilon()
    assert ledger.epsilon() > quiet.epsilon()
