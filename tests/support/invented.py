"""A coordinator that invents members of a secure sum: it enrols them itself, so it knows all their secrets.

Both attacks go for the change of honest client 0 and return once they have it: every number of it, in the clear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from promptfed.client_service.privacy.identity import identity_of
from promptfed.shared.secagg import member, opening
from promptfed.shared.secagg.keys import fingerprint, new_identity, public_identity, sign
from promptfed.shared.secagg.masks import Words, pair_mask, self_mask
from promptfed.shared.secagg.member import Secrets
from promptfed.shared.secagg.messages import ConfirmAnswer, ConfirmJob, Limits, UnmaskAnswer
from promptfed.shared.secagg.shares import Pair, combine
from promptfed.shared.secagg.vectors import Whole
from promptfed.shared.tensors.torch_tensors import decode
from tests.support.malicious import World
from tests.support.secure_sums import encode_change


class Invented:
    """``world``'s honest clients, and ``count`` members whom the coordinator has made up.

    The owner of every honest client has compared the keys of all other honest ones, and wants ``verified`` of them in
    each sum. ``unverified``: how many members with other keys it accepts.
    """

    def __init__(self, world: World, honest: int, count: int, verified: int, unverified: int = 0):
        self.world = World(world.folder / "honest", count=honest)
        works = self.world.works
        listed = frozenset(fingerprint(public_identity(identity_of(work._state))) for work in works)
        for work in works:
            work._limits = Limits(peers=listed, verified=verified, unverified=unverified)
        self.invented = range(honest, honest + count)
        self.secrets = {one: Secrets.fresh(new_identity()) for one in self.invented}
        self.held: dict[int, dict[int, Pair]] = {}

    def mask(self) -> Words:
        """Steps 0 to 2 of everybody, the invented included; the masked vector of client 0."""
        world = self.world
        honest = {k: world.keys(k) for k in range(world.count)}
        about = {n: v for n, v in honest[0].entry.model_dump().items() if not n.endswith("_key")}
        made_up = {k: member.signed_entry(own, about) for k, own in self.secrets.items()}
        world.entries = {**honest, **made_up}
        world.gather()
        world.share()
        own = {}
        for k in self.invented:
            place = world.place[k]
            world.shares[place], own[k] = member.share_secrets(self.secrets[k], world.roster, place)
        for k in self.invented:
            place = world.place[k]
            pairs = member.open_boxes(self.secrets[k], world.roster, place, world.mask_job(k), Limits())
            self.held[k] = {place: own[k], **pairs}
        masked = [world.ask("mask", k, world.mask_job(k)) for k in range(world.count)]
        vector: Words = decode(masked[0])[0]["masked"].numpy().view(np.uint64)
        return vector

    def confirm(self, client: int, job: ConfirmJob) -> ConfirmAnswer:
        """Step 3 of anybody; the invented sign whatever helps."""
        world = self.world
        if client not in self.secrets:
            return world.confirm(client, job)
        place = world.place[client]
        digest = opening.alive_digest([world.roster.hashes[one] for one in job.alive])
        signature = sign(self.secrets[client].identity, "confirm", member.confirmed(world.roster, place, digest)).hex()
        return ConfirmAnswer(alive_sha256=digest, signature=signature)

    def revealed(self, clients: Sequence[int], job: ConfirmJob) -> list[UnmaskAnswer]:
        """Steps 3 and 4 of the honest ``clients``, all told ``job``; the invented sign with them."""
        world = self.world
        signed = {world.place[k]: self.confirm(k, job) for k in (*clients, *self.invented)}
        told = {k: opening.unmask_job(signed) for k in clients}
        return [UnmaskAnswer.model_validate_json(world.ask("unmask", k, told[k])) for k in clients]

    def open(self, masked: Words, seeds: dict[int, bytes], mask_keys: dict[int, bytes]) -> None:
        """Take all masks off client 0's vector, and compare what is left with its change."""
        roster, place = self.world.roster, self.world.place[0]
        needed = roster.threshold
        seed, mask_key = (combine(dict(list(shares.items())[:needed])) for shares in (seeds, mask_keys))
        vector = masked - self_mask(seed, roster.sha256, len(masked))
        for other in roster.others(place):
            peer = bytes.fromhex(roster.entries[other].mask_key)
            vector -= pair_mask(mask_key, peer, roster.sha256, len(masked))
        assert np.array_equal(vector.view(np.int64), change_of(0, len(vector)))

    def own_shares(self, kind: int) -> dict[int, bytes]:
        """The shares of client 0's seed (kind 0) or mask key (kind 1) that were encrypted to the invented."""
        victim = self.world.place[0]
        return {self.world.place[k] + 1: self.held[k][victim][kind] for k in self.invented}

    def given(self, clients: Iterable[int], answers: Iterable[UnmaskAnswer], kind: str) -> dict[int, bytes]:
        """The shares of client 0's seed or mask key that honest ``clients`` have revealed."""
        victim = self.world.place[0]
        found = {}
        for k, answer in zip(clients, answers, strict=True):
            found[self.world.place[k] + 1] = dict(getattr(answer, kind))[victim]
        return found


def change_of(client: int, size: int) -> Whole:
    """The whole numbers that `World.keys` makes a client's change of."""
    return encode_change({"context": np.full(size, 0.25 * (client + 1), np.float32)}, {"context": np.zeros(size)})


def invented_members(world: World) -> None:
    """Six invented members beside three honest ones hold the threshold of six shares: nobody else is needed.

    Two other members are verified, which is all that ``verified`` can ask for.
    """
    attack = Invented(world, honest=3, count=6, verified=2)
    masked = attack.mask()
    attack.open(masked, attack.own_shares(0), attack.own_shares(1))


def split_lists(world: World, honest: int = 6, count: int = 3) -> None:
    """Half of the honest members are told that client 0 counts, the others that it has dropped out.

    With 2t - n invented members both lists have t signatures, and client 0's seed and mask key both t shares.
    """
    attack = Invented(world, honest, count, verified=2, unverified=count)
    masked = attack.mask()
    half = (honest + 1) // 2
    here, there = range(half), range(half, honest)
    everybody = attack.world.place.values()
    whole = opening.confirm_job(everybody, everybody)
    without = opening.confirm_job(everybody, set(everybody) - {attack.world.place[0]})
    first, second = attack.revealed(here, whole), attack.revealed(there, without)
    seeds = attack.own_shares(0) | attack.given(here, first, "seeds")
    mask_keys = attack.own_shares(1) | attack.given(there, second, "keys")
    attack.open(masked, seeds, mask_keys)


ATTACKS: Mapping[str, tuple[Callable[[World], None], str]] = {
    "invented_members": (invented_members, "policy-peers"),
    "split_lists": (split_lists, "policy-peers"),
}
"""As `tests.support.malicious.ATTACKS`."""
