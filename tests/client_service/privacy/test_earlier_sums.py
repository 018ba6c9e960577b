"""The rule of near payloads on both sides of its bound; `tests/privacy/test_one_sum_only.py` has the attacks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from promptfed.client_service.exits import ClientError, Failure
from promptfed.client_service.privacy import earlier_sums
from promptfed.client_service.privacy.earlier_sums import SUMS, EarlierSum, EarlierSums, shapes_of, sketched
from promptfed.client_service.privacy.policy import Policy
from promptfed.client_service.state.private_state import PrivateState
from promptfed.client_service.task_loop import _limits
from promptfed.shared.secagg import SecureError
from promptfed.shared.secagg.messages import Limits
from tests.support.malicious import World

IDENTITY = bytes(range(32))
ABC = ("a", "b", "c")


@pytest.mark.parametrize("size", [0, 3, 8_192, 700_000])
def test_sketches_are_as_far_apart_as_payloads(size: int) -> None:
    """Also where these are near, and far from zero."""
    draws = np.random.default_rng(size)
    payload = {"one": draws.normal(size=(1, size)).astype(np.float32), "two": draws.normal(size=size) * 100}
    moved = {name: tensor + 1e-3 * draws.normal(size=tensor.shape) for name, tensor in payload.items()}
    far = np.sqrt(sum(float(((moved[name] - tensor) ** 2).sum()) for name, tensor in payload.items()))
    sketch = sketched(IDENTITY, payload)
    assert sketch.shape == (earlier_sums.WIDTH,)
    assert np.linalg.norm(sketched(IDENTITY, moved) - sketch) == pytest.approx(far, rel=0.15 if size > 100 else 1.5)
    assert np.array_equal(sketched(IDENTITY, payload), sketch)
    assert not size or not np.allclose(sketched(bytes(32), payload), sketch), "nobody else can draw it"


def test_a_sketch_has_each_number_at_a_place_of_its_own_with_a_sign_of_its_own() -> None:
    rows = np.stack([sketched(IDENTITY, {"one": one}) for one in np.eye(64)])
    assert (np.abs(rows).sum(1) == 1).all()
    assert set(rows.sum(1)) == {-1.0, 1.0}
    places = np.abs(rows).argmax(1)
    assert len(set(places)) > 50
    assert all(len(set(places // 2**bit % 2)) == 2 for bit in range(9)), "all 512 are drawn"
    assert np.array_equal(sketched(IDENTITY, {"one": np.arange(64.0)}), np.arange(64.0) @ rows)
    golden = sketched(IDENTITY, {"one": np.arange(1.0, 7.0)})  # kept sketches are compared with those of later versions
    assert {int(at): golden[at] for at in np.nonzero(golden)[0]} == {
        104: 4.0, 165: -1.0, 453: -2.0, 487: 3.0, 495: 6.0, 508: -5.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("parts", "limits", "refused"),
    [
        (0.05, Limits(), True), (0.2, Limits(), False), (0.2, Limits(min_move=0.4), True),
        (0.05, Limits(min_move=0.0), False), (0.05, Limits(min_move=0.02), False),
    ],
)  # fmt: skip
def test_the_bound_is_a_tenth_of_the_own_change_unless_the_policy_says_otherwise(
    tmp_path: Path, parts: float, limits: Limits, refused: bool
) -> None:
    world = World(tmp_path, limits=limits)
    world.whole()
    world.nudge(parts)
    if not refused:
        assert len(world.whole(4, payload=b"moved", round=2)) == world.count - 1
        return
    with pytest.raises(Failure, match="the payload is nearly that of round 1, train, which other members") as told:
        world.whole(4, payload=b"moved", round=2)
    assert told.value.kind == "payload-repeated"


def test_the_policy_sets_the_bound() -> None:
    assert _limits(None).min_move == _limits(Policy(version=1)).min_move == 0.1
    own = Policy.model_validate({"version": 1, "secure_aggregation": {"min_move": 0.03}})
    assert _limits(own).min_move == 0.03


def test_the_same_members_and_the_same_phase_are_no_other_sum(tmp_path: Path) -> None:
    """A second attempt with a member less has the same payload; the next round's may be near for the same members."""
    world = World(tmp_path)
    world.begin()
    world.mask()
    world.count -= 1
    world.shares = {}
    world.whole(attempt=2)
    world = World(tmp_path / "another")
    for round in (1, 2, 3):
        world.whole(payload=b"%d" % round, round=round)
        world.nudge()


def sums(folder: Path) -> EarlierSums:
    return EarlierSums(PrivateState(folder, ephemeral=True, synced=True), 0.1)


def note(kept: EarlierSums, name: str, place: float, members: Sequence[str], attempt: int = 1, **about: object) -> None:
    facts = {"round": 1, "shapes": "x", "change": 1.0} | about
    kept.note(name, attempt, np.full(512, place), EarlierSum.model_validate(facts), members)


def test_an_unknown_list_is_another_one_and_an_earlier_round_stays_known(tmp_path: Path) -> None:
    near = np.full(512, 1e-4)
    kept = sums(tmp_path)
    note(kept, "one", 0.0, ())  # masked, and no list seen
    note(kept, "two", 9.0, ABC, round=2)
    for members in (ABC, ("a", "b")):
        with pytest.raises(SecureError):
            sums(tmp_path).expect_apart("three", near, "x", members)
    kept.expect_apart("three", near, "other tensors", ABC)
    note(kept, "one", 0.0, ABC)
    for members, final in ((ABC, True), (("c", "b", "a"), True), ((*ABC, "d"), False)):
        sums(tmp_path).expect_apart("three", near, "x", members, final)
    for members, final in (((*ABC, "d"), True), (("a", "b", "d"), False), (("a", "b"), False)):
        with pytest.raises(SecureError):
            sums(tmp_path).expect_apart("three", near, "x", members, final)
    note(kept, "one", 0.0, ("a", "b"), attempt=2)  # either may have been opened
    with pytest.raises(SecureError):
        kept.expect_apart("three", near, "x", ABC, final=True)


def test_more_members_hide_one_and_move_less(tmp_path: Path) -> None:
    """Of 100 the mean of independent changes moves by a tenth of one."""
    kept = sums(tmp_path)
    note(kept, "one", 0.0, ABC)
    for count, least in ((4, 0.1), (9, 0.1), (36, 0.05), (144, 0.025)):
        for times, apart in ((0.9, False), (1.1, True)):
            far = np.full(512, times * least / 512**0.5)
            members = [str(number) for number in range(count)]
            if apart:
                kept.expect_apart("two", far, "x", members, final=True)
            else:
                with pytest.raises(SecureError):
                    kept.expect_apart("two", far, "x", members, final=True)


def test_the_last_phases_are_kept_and_a_damaged_file_ends_the_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(earlier_sums, "MOST", 3)
    kept = sums(tmp_path)
    for round in (9, 10, 11, 12):
        note(kept, f"round {round}, train", float(round), ABC, round=round)
    for round in (10, 11, 12):
        with pytest.raises(SecureError):
            kept.expect_apart("next", np.full(512, float(round)), "x", ("a", "b"))
    kept.expect_apart("next", np.full(512, 9.0), "x", ("a", "b"))
    (tmp_path / SUMS).write_bytes(b"damaged")
    with pytest.raises(ClientError, match="is damaged"):
        kept.expect_apart("next", np.zeros(512), "x", ABC)


def test_payloads_of_other_tensors_are_told_apart() -> None:
    one = {"a": np.zeros((2, 3)), "b": np.zeros(1)}
    assert shapes_of(one) == shapes_of({name: one[name] + 1 for name in ("b", "a")})
    assert len({shapes_of(one), shapes_of({"a": np.zeros((3, 2)), "b": np.zeros(1)}), shapes_of({})}) == 3


@pytest.mark.parametrize(("apart", "members", "refused"), [
    (0.99, 4, True), (1.0, 4, False), (1.0, 9, False), (0.99, 9, True), (0.5, 36, False), (0.49, 36, True),
])  # fmt: skip
def test_just_that_far_is_far_enough(apart: float, members: int, refused: bool, tmp_path: Path) -> None:
    """A quarter of a change of 4; of 36 members half of that. Of other shapes nothing is near."""
    sums, zero = EarlierSums(PrivateState(tmp_path), 0.25), np.zeros(4)
    sums.note("round 1, train", 1, zero, EarlierSum(round=1, shapes="s", change=4.0), ["x", "y", "z"])
    given = np.array([apart, 0.0, 0.0, 0.0]), "s", [str(member) for member in range(members)], True
    sums.expect_apart("round 2, train", given[0], "others", given[2], True)
    with pytest.raises(SecureError, match="is nearly that of round 1") if refused else nullcontext():
        sums.expect_apart("round 2, train", *given)
    sums.expect_apart("round 1, train", *given)
