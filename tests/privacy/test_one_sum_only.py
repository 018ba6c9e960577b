"""A malicious coordinator gets one sum of a phase and no more; without any one of the checks it would get another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.privacy.mutants import MUTANTS, Mutant
from tests.support.malicious import ATTACKS, World, outcome


@pytest.mark.parametrize("name", ATTACKS)
def test_the_attack_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    attack, kind = ATTACKS[name]
    assert outcome(attack, tmp_path) == kind


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.attack}-{mutant.function}")
def test_without_the_check_the_attack_succeeds(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    assert outcome(ATTACKS[mutant.attack][0], tmp_path) == "had"


def test_every_attack_has_a_mutant() -> None:
    assert {mutant.attack for mutant in MUTANTS} == set(ATTACKS)


def test_an_honest_round_gives_each_client_s_shares_of_one_kind(tmp_path: Path) -> None:
    world = World(tmp_path)
    revealed = world.whole()
    for answer in revealed.values():
        assert not {one for one, _ in answer.seeds} & {one for one, _ in answer.keys}
        assert len(answer.seeds) == world.count
