"""A dry run of joining: it continues after a problem, and joins nothing.

It takes the steps of joining (`.enrolment`) one by one, and makes a line of each. With a coordinator it asks what an
enrolment token lets anybody ask: the federation's method, backbone and class names. Nothing of this machine is told to
it, and nothing is written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.http.bodies import SentLog
from promptfed.client_service.http.connection import BadAnswer, Refused
from promptfed.client_service.http.coordinator_client import CoordinatorClient, open_http
from promptfed.client_service.joining.checks import (
    Check,
    check_data,
    check_device,
    check_disk,
    check_recorded,
    check_versions,
)
from promptfed.client_service.joining.disclosure import Disclosure, disclose
from promptfed.client_service.joining.offer import (
    Offer,
    check_backbone,
    check_declaration,
    enrol_request,
    explain,
    federation_method,
    label_space,
    open_backbone,
)
from promptfed.client_service.privacy.noisy_counts import floor_of, states_of
from promptfed.client_service.privacy.policy import RULES, Policy, read_policy, refusals
from promptfed.client_service.privacy.protection import own_ledger, site_facts, site_plan
from promptfed.client_service.settings import Settings, make_settings, read_token
from promptfed.client_service.state.site_log import SiteLog
from promptfed.client_service.training.data import open_data
from promptfed.shared.clip import Backbone, BackboneError, shape_of
from promptfed.shared.data import Source
from promptfed.shared.messages import ENDED, EnrolmentInfo
from promptfed.shared.methods import check_fits
from promptfed.shared.methods.core.interface import Method, MethodError
from promptfed.shared.spec.spec import BackboneSpec, SpecError

ANSWER_SECONDS = 5.0  # that a coordinator gets to answer
NOBODY = "0" * 64  # in the place of a secret: none is made for a look
NEEDED = {"coordinator": "http://localhost", "federation": "none", "data": "none"}  # for what is not looked at

ALONE = {"_env_prefix": "PROMPTFED_NOTHING_"}  # nothing of the environment

Result = TypeVar("Result")


@dataclass
class Examination:
    """What was found so far of a client with ``settings``.

    ``missing`` ones were not given, and nobody looks at what needs them. ``backbone`` is the one to load where no
    coordinator names it.
    """

    settings: Settings
    backbone: BackboneSpec = field(default_factory=BackboneSpec)
    missing: Collection[str] = ()
    checks: list[Check] = field(default_factory=list)
    disclosure: Disclosure | None = None
    policy: Policy | None = None
    tests: dict[str, Source] = field(default_factory=dict)

    @classmethod
    def of(cls, backbone: BackboneSpec, **options: Any) -> Examination:
        """An examination of settings of which any may be missing (None). Raises ClientError as `make_settings` does."""
        present = {key: value for key, value in options.items() if value is not None}
        return cls(make_settings(**ALONE | NEEDED | present), backbone, NEEDED.keys() - present.keys())

    @property
    def healthy(self) -> bool:
        """Whether no check has failed."""
        return all(check.verdict != "fail" for check in self.checks)

    def run(self) -> None:
        """Make all checks."""
        self.checks += [check_versions(), check_device(self.settings.device), check_disk(self.settings.state_dir)]
        source = self._source()
        path = self.settings.policy_file
        read = None if path is None else self._try("policy", lambda: read_policy(path))
        self.policy = read[0] if read is not None else None
        info = self._federation()
        backbone = self._backbone(info)
        if info is not None:
            self._fit(info, source, backbone)

    def _try(self, name: str, job: Callable[[], Result]) -> Result | None:
        """The job's result; its error is a failed check."""
        try:
            return job()
        except (ClientError, MethodError, BackboneError, SpecError, Refused, BadAnswer) as error:
            self.checks.append(Check(name, "fail", str(error)))
            return None

    def _source(self) -> Source | None:
        settings = self.settings
        if "data" in self.missing:
            self.checks.append(Check("data", "warn", "not looked at", "give --data URI"))
            return None
        source = self._try("data", lambda: open_data(settings.data, settings.name, settings.domain, settings.role))
        if source is not None:
            self.checks += check_data(source, settings.role)
        for name, uri in settings.tests.items():
            test = self._try(f"test {name}", lambda uri=uri: open_data(uri, role="tests"))  # type: ignore[misc]
            if test is not None:
                self.checks.append(Check(f"test {name}", "pass", "can be opened"))
                self.tests[name] = test
        if source is not None:
            self.checks += check_recorded(settings.state_dir, source, self.tests, settings.new_data)
        return source

    def _federation(self) -> EnrolmentInfo | None:
        if "coordinator" in self.missing:
            advice = "give --coordinator, --federation, --enrolment-token-file"
            self.checks.append(Check("coordinator", "warn", "not asked", advice))
            return None
        if self.settings.policy_file is not None and self.policy is None:
            # It may forbid this coordinator.
            self.checks.append(Check("coordinator", "warn", "not asked", "the site's policy cannot be read"))
            return None
        token_file = self.settings.enrolment_token_file
        if "federation" in self.missing or token_file is None:
            self._try("coordinator", self._reach)
            return None
        return self._try("coordinator", lambda: self._ask(token_file))

    def _reach(self) -> None:
        """Name, port, certificate and the coordinator behind them, for which no token is needed."""
        settings = self.settings

        address = settings.first_coordinator

        async def ask() -> httpx.Response:
            async with open_http(settings) as http:
                coordinator = CoordinatorClient(http, address, settings.federation)
                try:
                    return await http.get(f"{address}/healthz", timeout=ANSWER_SECONDS)
                except httpx.HTTPError as error:
                    raise coordinator.unreachable(error) from None

        answer = asyncio.run(ask())
        if not answer.is_success or b'"ok"' not in answer.content:
            status = f"{answer.status_code} {answer.reason_phrase}"
            raise ClientError(Exit.UNREACHABLE, f"{address} answers /healthz with {status}, as no coordinator does")
        trusted = ", and its certificate is trusted" if address.startswith("https:") else ""
        text = f"{address} answers{trusted}"
        advice = "give --federation and --enrolment-token-file, to check whether this machine can join"
        self.checks.append(Check("coordinator", "pass", f"{text}; not asked about a federation", advice))

    def _ask(self, token_file: Path) -> EnrolmentInfo:
        settings, token = self.settings, read_token(token_file, "enrolment token")

        async def ask() -> EnrolmentInfo:
            async with open_http(settings) as http:
                coordinator = CoordinatorClient(http, settings.coordinator, settings.federation, ANSWER_SECONDS)
                if settings.state_dir.is_dir():  # a look makes no folder
                    coordinator.sent = SentLog(SiteLog(settings.state_dir).note)
                return await coordinator.enrolment(token)

        try:
            info = asyncio.run(ask())
        except Refused as refused:
            raise explain(refused, settings) from None
        text = f"answers, and takes the enrolment token; {info.name} is {info.state}"
        over = info.state in ENDED
        advice = "nobody can join it any more: ask the operator for another"
        self.checks.append(Check("coordinator", "fail" if over else "pass", text, advice if over else None))
        return info

    def _backbone(self, info: EnrolmentInfo | None) -> Backbone | None:
        spec = info.backbone if info is not None else self.backbone

        def load() -> Backbone:
            settings = self.settings
            backbone = open_backbone(spec, settings.device, settings.allow_backbone, settings.backbone_file)
            check_backbone(backbone, spec)
            return backbone

        backbone = self._try("backbone", load)
        if backbone is not None:
            whose = " as in the federation" if info is not None and spec.fingerprint is not None else ""
            text = f"{spec.model} ({spec.pretrained or 'random'}) loads, {backbone.fingerprint[:19]}...{whose}"
            self.checks.append(Check("backbone", "pass", text))
        return backbone

    def _fit(self, info: EnrolmentInfo, source: Source | None, backbone: Backbone | None) -> None:
        """Check method, backbone and class names together; then the disclosure can be made."""
        method = self._try("method", lambda: federation_method(info))
        if source is not None:
            self._policy(info, source)
        if method is None or backbone is None or source is None:
            return
        self.disclosure = self._try("method", lambda: self._fitted(info, method, source, backbone))
        if self.disclosure is not None:
            self.checks.append(Check("method", "pass", f"{method.name} runs with this backbone and these classes"))

    def _policy(self, info: EnrolmentInfo, source: Source) -> None:
        """A line for every rule of the site's policy, and for the privacy budget."""
        settings, policy = self.settings, self.policy
        if policy is not None:
            offended = {failure.kind: str(failure) for failure in refusals(policy, site_facts(info, settings, source))}
            for name in RULES:
                text = offended.get(f"policy-{name}")
                self.checks.append(Check(f"policy {name}", "fail" if text else "pass", text or "allowed"))
        if info.privacy is not None and info.privacy.protects_records and settings.role == "trainer":
            self._try("privacy", lambda: self._budget(info, source, policy))

    def _budget(self, info: EnrolmentInfo, source: Source, policy: Policy | None) -> None:
        ledger = own_ledger(self.settings, policy)
        new = ledger.delta() is None
        planned, _ = site_plan(info, federation_method(info), source.train, self.settings, policy, ledger)
        spent = 0.0 if new else ledger.epsilon()
        noise = f"noise of {planned.noise_multiplier:g} times the clip a step"
        text = (
            f"ε {planned.epsilon:.3g} planned, {spent:.3g} spent of {planned.most:g} at δ = {planned.delta:g}; {noise}"
        )
        advice = "is this the only copy of these images' budget? --ledger or the policy name another" if new else None
        self.checks.append(Check("privacy", "warn" if new else "pass", f"{text}; ledger {ledger.path}", advice))

    def _fitted(self, info: EnrolmentInfo, method: Method, source: Source, backbone: Backbone) -> Disclosure:
        settings = self.settings
        check_fits(method, shape_of(backbone))
        check_declaration(method, info, settings.role, source)
        method.check_classes(label_space(method, info, source.class_names))
        offer = Offer(info, method, source, self.tests, self.policy)
        offer.check_texts(backbone, settings.role)
        limits = floor_of(self.policy), states_of(self.policy)
        declared = offer.declared(settings, limits[0], backbone)
        enrol_request(declared, NOBODY, backbone)
        return disclose(offer.terms(settings), info, method, declared, shape_of(backbone), limits=limits)
