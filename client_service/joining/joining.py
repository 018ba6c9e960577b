"""Joining a federation: everything that can be wrong here is found before the coordinator learns of this client.

The steps that need no coordinator are the doctor's too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.http.connection import Refused
from promptfed.client_service.http.coordinator_client import CoordinatorClient
from promptfed.client_service.joining.checks import ACCEPT, Check, changed_data, check_data, check_device
from promptfed.client_service.joining.disclosure import Declared, Disclosure, disclose
from promptfed.client_service.joining.offer import (
    Offer,
    check_backbone,
    check_declaration,
    describe_device,
    enrol_request,
    enrolment_token,
    federation_method,
    open_backbone,
)
from promptfed.client_service.joining.parts import Consent, Parts
from promptfed.client_service.monitor import Monitor
from promptfed.client_service.privacy.agreement import Agreement
from promptfed.client_service.privacy.identity import identity_of
from promptfed.client_service.privacy.ledger import Ledger
from promptfed.client_service.privacy.noisy_counts import NoisyCounts, floor_of, states_of, what_leaves
from promptfed.client_service.privacy.policy import Policy, SiteFacts, allows, enforce, read_policy
from promptfed.client_service.privacy.protection import SiteProtection, own_ledger, site_facts, site_plan
from promptfed.client_service.serving.prediction import Predictor
from promptfed.client_service.settings import Settings
from promptfed.client_service.state.known_addresses import add_known, keep_known
from promptfed.client_service.state.private_state import DATA, ENROLMENT, Identity, PrivateState
from promptfed.client_service.state.trained_images import note_trained
from promptfed.client_service.training.compute import Compute
from promptfed.client_service.training.data import TEST, TRAIN, ClientData, check_scales, domain_of, open_data, split_by
from promptfed.client_service.training.kernels import use_precision
from promptfed.client_service.training.trainer import SitePrivacy, SiteRules, TaskWork
from promptfed.shared.clip import Backbone, BackboneError, shape_of
from promptfed.shared.clip.caches import features_in
from promptfed.shared.clip.sizes import shape_by_name
from promptfed.shared.data import DataError, Source
from promptfed.shared.data.identity import DataIdentity
from promptfed.shared.data.identity import identity_of as identity_of_data
from promptfed.shared.messages import ENDED, EnrolmentInfo, EnrolRequest
from promptfed.shared.methods import check_fits
from promptfed.shared.methods.core.interface import Method, MethodError
from promptfed.shared.spec.spec import BackboneShape

log = logging.getLogger("promptfed.client")
BEHIND_SECONDS = 60.0  # of features that are computed after the enrolment: a tenth of a phase's usual deadline


class FederationEnded(Exception):
    """There is nothing left to take part in."""


@dataclass
class Joining:
    """The steps from settings to an enrolled client."""

    settings: Settings
    parts: Parts
    state: PrivateState
    coordinator: CoordinatorClient
    compute: Compute
    monitor: Monitor
    predictor: Predictor | None
    info: EnrolmentInfo | None = None  # once it is known
    _rejoins: bool = False  # whether this client had enrolled before

    async def join(self) -> TaskWork:
        """Enrol, or be recognised, and return the object that carries out tasks.

        Raises:
            ClientError: what is wrong with data, backbone, state folder or settings.
            Refused: the coordinator does not take this client.
            FederationEnded: it is over, and nothing is to be served.
        """
        settings = self.settings
        identity = self.state.identity(settings.name, settings.role, self.parts.secret)
        self._rejoins = identity.client_id is not None
        source, tests = await self._data()
        data = await self.compute.run(partial(self._expect_data, identity, source, tests))

        self.monitor.stage("enrolling")
        policy = self._policy()
        if self.state.resumable:
            add_known(self.coordinator.addresses, self.state.folder, partial(allows, policy))
            keep_known(self.coordinator.addresses, self.state)
        token = self.parts.enrolment_token or enrolment_token(settings, identity)
        self.info, token = await self._info(token, identity)
        info = self.info
        trained, (source, tests) = source.train, split_by(info, source, tests, settings.role)
        identity = self.state.bind(identity, info.federation_id)
        self.coordinator.federation = info.federation_id
        self._expect_use(info, identity)
        method, facts = self._method(info, source, policy)
        offer = Offer(info, method, source, tests, policy)
        protection = await self._protection(offer)
        agreement, declared = await self._agreement(offer, protection)
        if protection is not None:
            await self.compute.run(protection.open)

        privacy = await self._privacy(offer, protection)

        backbone = await self._backbone(offer)
        agreement.pin(backbone.fingerprint)
        work = self._work(offer, backbone, agreement, privacy, SiteRules(policy, facts))
        use_precision(backbone.device, info.training.tf32)  # texts and images are kept for tasks, which compute alike
        await self.compute.run(lambda: self._check_texts(work, offer))
        behind = await self.compute.run(lambda: self._soon_computed(work, method, info))
        if not behind:
            await self.compute.run(lambda: self._warm(work, method, info))
        signing = identity_of(self.state) if info.secure_aggregation is not None else None
        declared = replace(declared, device=describe_device(backbone.device))
        request = enrol_request(declared, identity.secret, backbone, signing)
        if protection is not None:
            request = request.model_copy(update={"protection": protection.plan.enrolled()})
        await self._enrol(identity, token, request, source)
        self._keep_data(data)
        if behind:
            await self.compute.run(lambda: self._warm(work, method, info))
        if settings.role == "trainer" and info.rounds and not self.state.ephemeral:
            digests = (trained.digest(row) for row in range(len(trained)))  # with those held out, which chose a round
            await self.compute.run(lambda: note_trained(self.state.folder, info.federation_id, digests))
        await self.compute.run(lambda: work.restore_serving(self.compute.stopped))
        return work

    def _method(self, info: EnrolmentInfo, source: Source, policy: Policy | None) -> tuple[Method, SiteFacts]:
        """The federation's method, and what it asks of this site. Raises ClientError if one of them cannot be."""
        method = federation_method(info)
        facts = site_facts(info, self.settings, source)
        enforce(policy, facts)
        check_declaration(method, info, self.settings.role, source)
        return method, facts

    def _expect_use(self, info: EnrolmentInfo, identity: Identity) -> None:
        """Raises ClientError or FederationEnded if the federation is over and this client would serve nothing."""
        # An update whose receipt was cut off may be accepted: its private tensors belong to what this site has.
        if info.state not in ENDED or self.settings.serve or self.state.pending() is not None:
            return
        if identity.client_id is None:
            raise ClientError(Exit.REFUSED, f"the federation {info.name} is {info.state}: nobody can enrol any more")
        raise FederationEnded

    async def _privacy(self, offer: Offer, protection: SiteProtection | None) -> SitePrivacy:
        """How updates are protected here, and what leaves with evaluations."""
        parts, counts = self.parts.privacy, None
        floor, states = self._floor(offer), states_of(offer.policy)
        terms = offer.info, offer.method, self.settings.role, offer.policy, parts.plain_evaluations
        leaving = what_leaves(*terms, floor)
        if leaving == "noisy":
            counts = await self.compute.run(partial(self._counts, offer))
            leaving = "noisy" if counts is not None else "withheld"
        return SitePrivacy(protection, parts.noise, leaving, counts, floor, states)

    def _floor(self, offer: Offer) -> int:
        floor = self.parts.privacy.floor
        return floor_of(offer.policy) if floor is None else floor

    def _counts(self, offer: Offer) -> NoisyCounts | None:
        settings, rules = self.settings, offer.policy.privacy if offer.policy is not None else None
        most = rules.max_test_epsilon if rules is not None else settings.max_epsilon
        ledger, noise = self._ledger(offer), self.parts.privacy.noise
        counts = NoisyCounts(offer.info, ledger, noise, self.state, most, settings.name, settings.first_coordinator)
        return counts.begun(offer.source, offer.tests, rules.delta if rules is not None else None)

    def _ledger(self, offer: Offer) -> Ledger:
        return self.parts.privacy.ledger or own_ledger(self.settings, offer.policy)

    async def _data(self) -> tuple[Source, Mapping[str, Source]]:
        """The client's data and its test sets. One that cannot be declared is refused before anybody is asked."""
        settings, source, tests = self.settings, self.parts.source, self.parts.tests
        if source is None:
            source = await self.compute.run(
                lambda: open_data(settings.data, settings.name, settings.domain, settings.role)
            )
        if tests is None:
            tests = await self.compute.run(
                lambda: {name: open_data(uri, role="tests") for name, uri in settings.tests.items()}
            )
        domain_of(source)
        check_scales(source, tests)
        return source, tests

    def _expect_data(self, identity: Identity, source: Source, tests: Mapping[str, Source]) -> DataIdentity | None:
        """What the data are now, where another process may go on with this client's state.

        Raises:
            ClientError: BAD_INPUT where this client has enrolled with others, and its owner does not accept it.
        """
        if not self.state.resumable:
            return None
        try:
            now, before = identity_of_data(source, tests), self.state.read_as(DATA, DataIdentity)
        except DataError as error:
            raise ClientError(Exit.BAD_INPUT, str(error)) from None
        text = changed_data(before, now)
        if identity.client_id is None or not text:
            return now
        if not self.settings.new_data:
            raise ClientError(Exit.BAD_INPUT, f"{text}; {ACCEPT}")
        log.info("%s; as the owner accepts", text)
        return now

    def _keep_data(self, now: DataIdentity | None) -> None:
        """Keep what the data are, which never leaves. A folder that did not know takes them now."""
        before = self.state.read_as(DATA, DataIdentity) if now is not None else None
        if now is None or before == now:
            return
        if before is None and self._rejoins:
            log.info("this client's folder did not know its data: it takes those of today")
        if before is not None:  # test sets that are not given today are known again when they are
            now = now.model_copy(update={"splits": before.splits | now.splits})
        self.state.write_as(DATA, now)

    def _work(
        self, offer: Offer, backbone: Backbone, agreement: Agreement, privacy: SitePrivacy, rules: SiteRules
    ) -> TaskWork:
        settings, parts = self.settings, self.parts
        uris = [source.uri for source in (offer.source, *offer.tests.values())]
        patches = offer.method.needs.patch_tokens
        cache = parts.features or features_in(settings.feature_cache, settings.features_dir, uris, patches)
        if settings.reset_private:
            self.state.reset_private()
        return parts.work(
            settings.name,
            settings.role,
            backbone,
            ClientData(offer.source, backbone, cache, self.compute.stopped, offer.tests),
            self.state,
            self.predictor,
            agreement,
            parts.record,
            privacy,
            rules,
        )

    async def _backbone(self, offer: Offer) -> Backbone:
        settings, backbone = self.settings, self.parts.backbone
        if backbone is None:
            options = settings.device, settings.allow_backbone, settings.backbone_file
            backbone = await self.compute.run(partial(open_backbone, offer.info.backbone, *options))
        await self.compute.run(partial(check_backbone, backbone, offer.info.backbone))
        try:
            check_fits(offer.method, shape_of(backbone))
        except MethodError as error:
            raise ClientError(Exit.BACKBONE, str(error)) from None
        self.monitor.status.backbone, self.monitor.status.device = backbone.fingerprint, str(backbone.device)
        return backbone

    async def _info(self, token: str | None, identity: Identity) -> tuple[EnrolmentInfo, str | None]:
        """What the coordinator says of the federation, or said when this client enrolled; the token if it is valid."""
        kept = self.state.enrolment() if identity.client_id is not None else None
        if kept is not None and self.settings.federation not in (kept.name, kept.federation_id):
            text = f"the state folder {self.state.folder} belongs to federation {kept.name}: give another --state-dir"
            raise ClientError(Exit.STATE, text)
        if token is not None:
            try:
                info = await self.coordinator.enrolment(token)
            except Refused as refused:
                if refused.status != 401 or kept is None:
                    raise
                log.info("the enrolment token is no longer valid: going on with this client's own secret")
            else:
                self.state.write_as(ENROLMENT, info)
                return info, token
        if kept is None:
            text = f"the state folder {self.state.folder} does not hold all that the federation trains by"
            text += ": give --enrolment-token-file, what the folder holds is kept"
            raise ClientError(Exit.NOT_ALLOWED, text)
        return kept, None

    def _check_texts(self, work: TaskWork, offer: Offer) -> None:
        torch.set_num_threads(offer.info.training.threads)
        try:
            offer.check_texts(work.backbone, self.settings.role)
        except BackboneError as error:
            raise ClientError(Exit.BAD_INPUT, str(error)) from None

    def _soon_computed(self, work: TaskWork, method: Method, info: EnrolmentInfo) -> bool:
        """Whether features are missing that take so little time that the client may enrol before it computes them.

        All images are read for it: one that cannot be is found before the coordinator learns of this client.
        """
        if not method.needs.cached_features or method.needs.patch_tokens:
            return False
        torch.set_num_threads(info.training.threads)  # which the bits of features depend on
        try:
            missing = work.data.missing_features(self._kept_parts(work))
        except DataError as error:
            raise ClientError(Exit.BAD_INPUT, str(error)) from None
        return missing > 0 and missing * _seconds_each(work.backbone) <= BEHIND_SECONDS

    def _kept_parts(self, work: TaskWork) -> list[str]:
        return [*([TRAIN] if self.settings.role == "trainer" else []), TEST, *work.data.tests]

    def _warm(self, work: TaskWork, method: Method, info: EnrolmentInfo) -> None:
        """Compute image features before the first task, and long ones before enrolling: no deadline runs yet."""
        torch.set_num_threads(info.training.threads)
        if not method.needs.cached_features:
            return
        watched, parts = self.parts.consent is not None, self._kept_parts(work)
        if method.needs.patch_tokens:
            self._tell_patch_cost(work, parts)
        try:
            for name in parts:
                work.data.features(name, watched)
                if method.needs.patch_tokens:
                    work.data.keep_patches(name)
        except DataError as error:
            raise ClientError(Exit.BAD_INPUT, str(error)) from None

    def _tell_patch_cost(self, work: TaskWork, parts: Sequence[str]) -> None:
        """Tell how much disk the patch features will take before any is computed; refuse if there is no room."""
        cost = work.data.patch_cost(parts)
        if not cost.images:
            return
        text = f"the patch features of {cost.images:,} images take {cost.bytes / 1e6:,.1f} MB in {cost.folder}"
        if not cost.fits:
            free = f"{cost.free / 1e6:,.1f} MB are free there"
            remedy = "give --feature-cache a folder with room, or fewer images"
            raise ClientError(Exit.BAD_INPUT, f"{text}; {free}: {remedy}")
        log.info("%s; %s MB are free there", text, f"{cost.free / 1e6:,.1f}")

    def _policy(self) -> Policy | None:
        """The site's policy. Raises ClientError (POLICY) if there is one and it cannot be used."""
        if (path := self.settings.policy_file) is None:
            return None
        policy, digest = read_policy(path)
        log.info("this site's policy %s (sha256 %s) is enforced", path, digest)
        return policy

    async def _protection(self, offer: Offer) -> SiteProtection | None:
        """The cost of the federation's differential privacy here. It is refused before anybody is asked if too high.

        Raises:
            ClientError: LEDGER.
        """
        settings, info = self.settings, offer.info
        if info.privacy is None or not info.privacy.protects_records or settings.role != "trainer":
            return None
        ledger, noise = self._ledger(offer), self.parts.privacy.noise
        job = partial(site_plan, info, offer.method, offer.source.train, settings, offer.policy, ledger, self.state)
        planned, groups = await self.compute.run(job)
        where = settings.first_coordinator, info.federation_id
        return SiteProtection(info.privacy, planned, ledger, noise, *where, groups, info.name, self.state)

    async def _agreement(self, offer: Offer, protection: SiteProtection | None) -> tuple[Agreement, Declared]:
        """The owner's agreement, asked for now if necessary, and what is declared with it.

        No backbone is loaded for it, and no feature computed: until then nothing is done for the federation.
        """
        settings, info, source = self.settings, offer.info, offer.source
        terms, declared = offer.terms(settings), offer.declared(settings, self._floor(offer), self.parts.backbone)
        agreement = Agreement.kept(self.state)
        changes = agreement.changes(terms) if agreement is not None else []
        if agreement is not None and not changes:
            return agreement, declared
        if self.parts.consent is not None:
            planned, shape = protection.plan if protection is not None else None, await self._shape(info)
            limits = self._floor(offer), states_of(offer.policy)
            disclosure = disclose(terms, info, offer.method, declared, shape, changes, planned, limits)
            await self._ask(self.parts.consent, disclosure, source)
        return Agreement.made(self.state, terms), declared

    async def _shape(self, info: EnrolmentInfo) -> BackboneShape | None:
        """The backbone's sizes, as far as they are known without its weights."""
        if self.parts.backbone is not None:
            return shape_of(self.parts.backbone)
        return info.backbone.shape or await self.compute.run(lambda: shape_by_name(info.backbone.model))

    async def _ask(self, consent: Consent, disclosure: Disclosure, source: Source) -> None:
        """Show the checks and what will be sent; continue only with consent."""
        checks = await self.compute.run(lambda: self._checks(source))
        if await consent(checks, disclosure):
            return
        if not disclosure.changes:
            raise ClientError(Exit.DECLINED, "not joined, as you decided: nothing of the above was sent")
        changed = "; ".join(disclosure.changes)
        remedy = f"start the client at a terminal to be asked, or with --agree {disclosure.terms.digest}"
        raise ClientError(Exit.DECLINED, f"the federation is not what you agreed to ({changed}): {remedy}")

    def _checks(self, source: Source) -> list[Check]:
        """The checks, also those that passed."""
        return [*check_data(source, self.settings.role), check_device(self.settings.device)]

    async def _enrol(self, identity: Identity, token: str | None, request: EnrolRequest, source: Source) -> None:
        self.coordinator.token = identity.secret
        if token is not None:
            try:
                response = await self.coordinator.enrol(token, request)
            except Refused as refused:
                # Who has enrolled can go on with its secret; the next poll says where the federation stands.
                if identity.client_id is None or refused.status not in (401, 410):
                    raise
            else:
                identity = self.state.bind(identity, response.federation_id, response.client_id)
        self.monitor.status.client_id = identity.client_id
        self.monitor.tell("enrolled", client_id=identity.client_id, train=len(source.train), test=len(source.test))


def _seconds_each(backbone: Backbone) -> float:
    """About how long the image tower takes for an image."""
    image = torch.zeros(1, 3, *backbone.image_size)
    backbone.encode_images(image).tolist()  # the first one takes longer; a device is waited for
    started = time.perf_counter()
    backbone.encode_images(image).tolist()
    return time.perf_counter() - started
