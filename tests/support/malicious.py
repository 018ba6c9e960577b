"""A coordinator that tries to learn more than one sum, against real clients' part of secure sums (`SecureWork`).

Each attack returns once it has what it was after; where a client refuses, the client's `Failure` is raised. `Kept` is
raised where a client answers with the very bytes of before, which tell nothing new.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from promptfed.client_service.exits import Failure
from promptfed.client_service.privacy.identity import identity_of
from promptfed.client_service.privacy.secure import SecureWork, Trained
from promptfed.client_service.state.private_state import PrivateState, TensorOrigin
from promptfed.shared.messages import PayloadRef, SecurePart, Task, TaskConfig
from promptfed.shared.secagg import member, messages, opening
from promptfed.shared.secagg.keys import fingerprint, new_identity, new_pair, public_identity, public_of, sign
from promptfed.shared.secagg.messages import (
    ConfirmAnswer,
    ConfirmJob,
    KeysAnswer,
    Limits,
    MaskJob,
    SharesAnswer,
    UnmaskAnswer,
    UnmaskJob,
)
from promptfed.shared.spec.sections import SecureAggregationSpec
from promptfed.shared.spec.spec import BackboneSpec
from promptfed.shared.spec.weighting import Weighting

SIZE = 70
SPEC = SecureAggregationSpec(minimum=4)


class Kept(Exception):
    """The client has answered this step before, and answers the same."""


@dataclass
class World:
    """Some honest clients, each on a folder of its own, and what the coordinator has of them."""

    folder: Path
    count: int = 5
    samples: Sequence[int] = ()
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        folders = [self.folder / f"client-{k}" for k in range(self.count)]
        states = [PrivateState(folder, ephemeral=True, synced=True) for folder in folders]
        self.works = [SecureWork(state, "fed-1", self.limits) for state in states]
        self.prompts = torch.zeros(SIZE)
        self.entries: dict[int, KeysAnswer] = {}
        self.place: dict[int, int] = {}
        self.shares: dict[int, SharesAnswer] = {}

    @property
    def rule(self) -> Weighting:
        """By samples where there are any."""
        return Weighting(weighting="samples" if self.samples else "uniform", max_weight_share=1.0)

    def task(self, kind: str, client: int, payload: bytes = b"prompts", **about: Any) -> Task:
        """What a client is asked, in round 1 and attempt 1 unless ``about`` says otherwise."""
        where = {"round": 1, "attempt": 1} | about
        digest = "sha256:" + hashlib.sha256(payload).hexdigest()
        return Task(
            task_id=f"{kind}-{client}-{where['round']}-{where['attempt']}", kind=kind, round=where["round"],
            phase="train", deadline=datetime.now(UTC), seconds_left=60.0,
            payload=PayloadRef(url="/payload", bytes=len(payload), sha256=digest),
            config=TaskConfig(
                method={"name": "promptfl"}, training={}, backbone=BackboneSpec(), class_names=None, template=None,
                rounds=9, seed=0, peers=[], secure_aggregation=SPEC, weighting=self.rule,
            ),
            secure=SecurePart(phase="train", attempt=where["attempt"]),
        )  # fmt: skip

    def keys(self, client: int, payload: bytes = b"prompts", **about: Any) -> KeysAnswer:
        """Step 0 of one client: it trains where it has not, and signs."""
        task, work = self.task("train", client, payload, **about), self.works[client]
        work.samples = self.samples[client] if self.samples else 1
        work.settle(task)
        work.expect(task)
        if not work.is_trained(task):
            update = {"context": self.prompts + 0.25 * (client + 1)}
            about_it = TensorOrigin(task.task_id, task.round, task.phase)
            work.keep(task, {"context": self.prompts}, Trained(update, {}, about_it))
        return KeysAnswer.model_validate_json(work.keys(task).body)

    def ask(self, kind: str, client: int, told: Any, **about: Any) -> bytes:
        """A later step of one client."""
        task, work = self.task(kind, client, told.model_dump_json().encode(), **about), self.works[client]
        work.settle(task)
        work.expect(task)
        return work.answer(task, told.model_dump_json().encode()).body

    def begin(self, **about: Any) -> None:
        """Everybody's keys, and the roster as it should be."""
        self.entries = {k: self.keys(k, **about) for k in range(self.count)}
        self.gather()

    def gather(self) -> None:
        """The roster of ``entries``."""
        self.roster, self.signed = messages.make_roster(self.entries.values(), SPEC, self.rule)
        self.place = {k: self.roster.place_of(answer.entry) for k, answer in self.entries.items()}
        self.client = {place: k for k, place in self.place.items()}

    def share(self, **about: Any) -> None:
        """Step 1 of everybody."""
        for k in range(self.count):
            body = self.ask("share", k, self.roster.message(self.signed), **about)
            self.shares[self.place[k]] = SharesAnswer.model_validate_json(body)

    def mask_job(self, client: int, sharing: Sequence[int] | None = None) -> MaskJob:
        """What step 2 tells, with ``sharing`` (places) as U2 in the place of all."""
        chosen = self.shares if sharing is None else {place: self.shares[place] for place in sharing}
        return opening.mask_job(self.roster, self.place[client], chosen)

    def mask(self, **about: Any) -> None:
        """Steps 1 and 2 of everybody."""
        self.share(**about)
        for k in range(self.count):
            self.ask("mask", k, self.mask_job(k), **about)

    def listed(self, *gone: int) -> ConfirmJob:
        """All but the clients ``gone``, which are told to have dropped out."""
        dropped = {self.place[k] for k in gone}
        return opening.confirm_job(self.shares, set(self.shares) - dropped)

    def confirm(self, client: int, job: ConfirmJob, **about: Any) -> ConfirmAnswer:
        """Step 3 of one client."""
        return ConfirmAnswer.model_validate_json(self.ask("confirm", client, job, **about))

    def whole(self, *gone: int, payload: bytes = b"prompts", **about: Any) -> dict[int, UnmaskAnswer]:
        """An honest round to its end, in which the clients ``gone`` drop out at last; what the others have revealed."""
        self.shares = {}
        self.begin(payload=payload, **about)
        self.mask(**about)
        there = [k for k in range(self.count) if k not in gone]
        signed = {self.place[k]: self.confirm(k, self.listed(*gone), **about) for k in there}
        jobs = {k: opening.unmask_job(signed) for k in there}
        return {k: UnmaskAnswer.model_validate_json(self.ask("unmask", k, job, **about)) for k, job in jobs.items()}

    def nudge(self, parts: float = 0.0) -> None:
        """Move the prompts by so many parts of the largest change, or by one unit in the last place."""
        far = self.prompts + 0.25 * self.count * parts if parts else torch.nextafter(self.prompts, torch.tensor(9.0))
        assert not torch.equal(far, self.prompts)
        self.prompts = far


def other_lists(world: World) -> None:
    """Half of the clients are told that 4 has dropped out, the others that 3 has: both kinds of shares of both."""
    world.begin()
    world.mask()
    here, there = world.listed(4), world.listed(3)
    signed = {world.place[k]: world.confirm(k, here if k < 2 else there) for k in (0, 1, 2)}
    for k in (0, 2):
        world.ask("unmask", k, opening.unmask_job(signed))


def too_few_signatures(world: World) -> None:
    """A client is asked to reveal for a list that it alone has signed."""
    world.begin()
    world.mask()
    signed = {world.place[0]: world.confirm(0, world.listed(4))}
    world.ask("unmask", 0, opening.unmask_job(signed))


def one_signature_thrice(world: World) -> None:
    """The same, with the one signature given as often as it takes."""
    world.begin()
    world.mask()
    mine = world.confirm(0, world.listed(4)).signature
    world.ask("unmask", 0, UnmaskJob(signatures=[(world.place[0], mine)] * 3))


def forged_signatures(world: World) -> None:
    """The same, with signatures of a key that the coordinator has made."""
    world.begin()
    world.mask()
    job = world.listed(4)
    world.confirm(0, job)
    own = new_identity()
    digest = opening.alive_digest([world.roster.hashes[one] for one in job.alive])
    forged = [(one, sign(own, "confirm", member.confirmed(world.roster, one, digest)).hex()) for one in job.alive]
    world.ask("unmask", 0, UnmaskJob(signatures=forged))


def a_second_list(world: World) -> None:
    """A client that has signed one list is asked for another one in the same attempt."""
    world.begin()
    world.mask()
    first = world.confirm(0, world.listed(4))
    if world.confirm(0, world.listed(3)) == first:
        raise Kept


def a_second_mask(world: World) -> None:
    """A client is asked for its masked change twice, among others each time: the difference is a pair's mask."""
    world.begin()
    world.share()
    first = world.ask("mask", 0, world.mask_job(0))
    some = sorted(world.place[k] for k in (0, 1, 2, 3))
    if world.ask("mask", 0, world.mask_job(0, some)) == first:
        raise Kept


def another_attempt(world: World) -> None:
    """Once the sum is open, the same phase is asked for again with one client fewer."""
    world.whole()
    world.keys(0, attempt=2)


def an_attempt_set_back(world: World) -> None:
    """A client's file of the attempt is set back to before it signed, and another list is opened."""
    world.begin()
    world.mask()
    kept = [work._state.read_note("secure-attempt.json") or "" for work in world.works]
    for gone in (4, 3):
        for work, before in zip(world.works, kept, strict=True):
            work._state.write_note("secure-attempt.json", before)
        job = world.listed(gone)
        there = [k for k in range(world.count) if k != gone]
        signed = {world.place[k]: world.confirm(k, job) for k in there}
        world.ask("unmask", 0, opening.unmask_job(signed))


def the_same_payload(world: World) -> None:
    """The next round begins with the very prompts of this one."""
    world.whole()
    world.keys(0, round=2)


def nearly_the_same_payload(world: World) -> None:
    """The next round's prompts differ by a unit in the last place, and one member of the roster is gone."""
    world.prompts += 1
    world.whole()
    world.nudge()
    world.count -= 1
    world.whole(payload=b"nudged", round=2)


def nearly_the_same_and_one_drops_out(world: World) -> None:
    """The same with the same roster, of which one is told to have dropped out at last, and a round in between."""
    world.prompts += 1
    world.whole()
    before = world.prompts
    world.nudge(1.0)
    world.whole(payload=b"moved", round=2)
    world.prompts = before
    world.nudge()
    world.whole(4, payload=b"nudged", round=3)


def nearly_the_same_and_one_comes_back(world: World) -> None:
    """The first sum is that with a member less, and clients have been started anew since."""
    world.prompts += 1
    world.count -= 1
    world.whole()
    world.count += 1
    world.nudge()
    for k, work in enumerate(world.works):
        state = PrivateState(work._state.folder, ephemeral=True, synced=True)
        world.works[k] = SecureWork(state, "fed-1", world.limits)
    world.whole(payload=b"nudged", round=2)


def an_earlier_round(world: World) -> None:
    """A round that is over is asked for with other prompts."""
    world.keys(0, payload=b"later prompts", round=2)
    world.keys(0, payload=b"other prompts", round=1)


def another_payload(world: World) -> None:
    """One client gets prompts of its own."""
    world.entries = {k: world.keys(k, payload=b"crafted" if k == 0 else b"prompts") for k in range(world.count)}
    world.gather()
    world.ask("share", 0, world.roster.message(world.signed))


def swapped_keys(world: World) -> None:
    """The coordinator puts a mask key of its own into another client's entry."""
    world.entries = {k: world.keys(k) for k in range(world.count)}
    entry = world.entries[1].entry.model_copy(update={"mask_key": public_of(new_pair()).hex()})
    world.entries[1] = KeysAnswer(entry=entry, signature=world.entries[1].signature)
    world.gather()
    world.ask("share", 0, world.roster.message(world.signed))


def one_identity_twice(world: World) -> None:
    """One colluder stands in the roster under two entries, both signed by it."""
    world.entries = {k: world.keys(k) for k in range(world.count)}
    colluder = member.Secrets.fresh(new_identity())
    about = {name: value for name, value in world.entries[1].entry.model_dump().items() if not name.endswith("_key")}
    for k in (1, 2):
        other = member.Secrets(colluder.identity, new_pair(), new_pair(), colluder.seed)
        world.entries[k] = member.signed_entry(other, about)
    world.gather()
    world.ask("share", 0, world.roster.message(world.signed))


def swapped_boxes(world: World) -> None:
    """Two peers' shares come under each other's names."""
    world.begin()
    world.share()
    job = world.mask_job(0)
    (one, first), (other, second), *rest = job.boxes
    boxes = [(one, second), (other, first), *rest]
    world.ask("mask", 0, job.model_copy(update={"boxes": boxes}))


def of_any_effect(world: World) -> None:
    """Let the clients accept sums of few effective members, so that only the check under attack can refuse."""
    for work in world.works:
        work._limits = Limits(min_effective=1.0)


def too_few_share(world: World) -> None:
    """Only two clients are told to have shared: each would know the other's change."""
    of_any_effect(world)
    world.begin()
    world.share()
    world.ask("mask", 0, world.mask_job(0, sorted(world.place[k] for k in (0, 1))))


def too_few_alive(world: World) -> None:
    """All but two are told to have dropped out after they masked."""
    of_any_effect(world)
    world.begin()
    world.mask()
    world.confirm(0, world.listed(2, 3, 4))


def forgotten_in_the_list(world: World) -> None:
    """One that masked stands neither among those who count nor among those who dropped out."""
    world.begin()
    world.mask()
    job = world.listed(4)
    world.confirm(0, ConfirmJob(alive=job.alive, dropped=[]))


def fewer_than_the_spec_promises(world: World) -> None:
    """Three of five, which the threshold allows and the spec's minimum of four does not, are told to count."""
    world.begin()
    world.mask()
    world.confirm(0, world.listed(3, 4))


def heavy_weight(world: World) -> None:
    """One client has 65,535 samples and all others 1: the sum is its change."""
    of_any_effect(world)
    world.samples = [65_535, 1, 1, 1, 1]
    world.begin()
    world.share()
    world.ask("mask", 0, world.mask_job(0))


def light_weights(world: World) -> None:
    """Two clients have all samples but three: the sum is that of two, of whom each would know the other's change."""
    world.samples = [1000, 1000, 1, 1, 1]
    world.begin()
    world.share()
    world.ask("mask", 0, world.mask_job(0))


def strangers(world: World) -> None:
    """A sum that leaves out a member whom the owner knows, though its policy wants four of these."""
    world = World(world.folder / "six", count=6)
    known = [fingerprint(public_identity(identity_of(work._state))) for work in world.works[:5]]
    world.works[0]._limits = Limits(peers=frozenset(known), verified=4, unverified=1)
    world.begin()
    world.share()
    world.ask("mask", 0, world.mask_job(0, sorted(world.place[k] for k in (0, 1, 2, 3, 5))))


ATTACKS: Mapping[str, tuple[Callable[[World], None], str]] = {
    attack.__name__: (attack, kind)
    for attack, kind in (
        (other_lists, "bad-roster"), (too_few_signatures, "bad-roster"), (one_signature_thrice, "bad-roster"),
        (forged_signatures, "bad-roster"), (a_second_list, "kept"), (a_second_mask, "kept"),
        (another_attempt, "already-revealed"), (an_attempt_set_back, "already-revealed"),
        (the_same_payload, "payload-repeated"), (an_earlier_round, "payload-repeated"),
        (nearly_the_same_payload, "payload-repeated"), (nearly_the_same_and_one_drops_out, "payload-repeated"),
        (nearly_the_same_and_one_comes_back, "payload-repeated"),
        (another_payload, "bad-roster"), (swapped_keys, "bad-roster"), (one_identity_twice, "bad-roster"),
        (swapped_boxes, "bad-shares"), (too_few_share, "policy-minimum"), (too_few_alive, "policy-minimum"),
        (forgotten_in_the_list, "bad-roster"), (fewer_than_the_spec_promises, "policy-minimum"),
        (heavy_weight, "policy-share"), (light_weights, "policy-effective"), (strangers, "policy-peers"),
    )
}  # fmt: skip
"""Each attack by its name, with the failure that a client reports; ``kept``: it answers as before."""


def outcome(attack: Callable[[World], None], folder: Path) -> str:
    """The kind of the refusal; ``had`` where the coordinator has got what it was after."""
    try:
        attack(World(folder))
    except Kept:
        return "kept"
    except Failure as failure:
        return failure.kind
    return "had"
