"""Looks at everything that joining a federation needs, goes on after what is wrong, and joins nothing.

With a coordinator it asks what an enrolment token lets anybody ask: the federation's method, backbone and class names.
Nothing of this machine is told to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from promptfed.client_service.coordinator_client import BadAnswer, CoordinatorClient, Refused, http_to
from promptfed.client_service.exits import ClientError
from promptfed.client_service.joining.checks import (
    Check,
    check_clock,
    check_data,
    check_device,
    check_disk,
    check_versions,
)
from promptfed.client_service.joining.disclosure import Disclosure, disclose
from promptfed.client_service.joining.enrolment import (
    check_backbone,
    check_protocol,
    enrol_request,
    explain,
    open_backbone,
)
from promptfed.client_service.settings import Settings, make_settings, read_token
from promptfed.client_service.training.data import check_classes, check_domain, domain_of, open_data
from promptfed.shared.clip import Backbone, BackboneError, shape_of
from promptfed.shared.data import Source
from promptfed.shared.messages import EnrolmentInfo
from promptfed.shared.methods import check_fits, make_method
from promptfed.shared.methods.core.base import Method, MethodError
from promptfed.shared.spec import BackboneSpec, SpecError

ANSWER_SECONDS = 5.0  # that a coordinator gets to answer
NOBODY = "0" * 64  # in the place of a secret: none is made for a look

Result = TypeVar("Result")


@dataclass(frozen=True)
class Patient:
    """What is looked at; without ``coordinator`` or ``data`` nobody looks at what needs it.

    ``backbone`` is the one to load where no coordinator names it.
    """

    coordinator: str | None = None
    federation: str | None = None
    enrolment_token_file: Path | None = None
    data: str | None = None
    domain: str | None = None
    tests: dict[str, str] = field(default_factory=dict)
    role: str = "trainer"
    name: str | None = None
    device: str = "auto"
    state_dir: Path | None = None
    backbone: BackboneSpec = field(default_factory=BackboneSpec)
    allow_backbone: Sequence[str] = ()
    ca_file: Path | None = None
    allow_plain_http: bool = False

    @classmethod
    def of(cls, settings: Settings) -> Patient:
        """A client as its settings describe it."""
        shared = set(cls.__dataclass_fields__) & set(Settings.model_fields)
        return cls(**{key: getattr(settings, key) for key in shared}, tests=settings.tests)


@dataclass
class Examination:
    """What was found so far."""

    patient: Patient
    checks: list[Check] = field(default_factory=list)
    disclosure: Disclosure | None = None

    @property
    def healthy(self) -> bool:
        """Whether nothing stands in the way of joining."""
        return all(check.verdict != "fail" for check in self.checks)

    def run(self) -> None:
        """Look at everything."""
        patient = self.patient
        self.checks += [check_versions(), check_device(patient.device)]
        self.checks.append(check_disk(patient.state_dir or Path.home()))
        source = self._source()
        info = self._federation()
        backbone = self._backbone(info)
        if info is not None:
            self._fits(info, source, backbone)

    def _try(self, name: str, job: Callable[[], Result]) -> Result | None:
        """The job's result; its error is a failed check."""
        try:
            return job()
        except (ClientError, MethodError, BackboneError, SpecError, Refused, BadAnswer) as error:
            self.checks.append(Check(name, "fail", str(error)))
            return None

    def _source(self) -> Source | None:
        uri = self.patient.data
        if uri is None:
            self.checks.append(Check("data", "warn", "not looked at", "give --data URI"))
            return None
        name = self.patient.name or "here"
        source = self._try("data", lambda: open_data(uri, name, self.patient.domain))
        if source is not None:
            self.checks += check_data(source, self.patient.role)
        for name, other in self.patient.tests.items():
            if self._try(f"test {name}", lambda other=other: open_data(other)) is not None:  # type: ignore[misc]
                self.checks.append(Check(f"test {name}", "pass", "can be opened"))
        return source

    def _federation(self) -> EnrolmentInfo | None:
        patient = self.patient
        if patient.coordinator is None:
            self.checks.append(
                Check("coordinator", "warn", "not asked", "give --coordinator, --federation, --enrolment-token-file")
            )
            return None
        if patient.federation is None or patient.enrolment_token_file is None:
            self.checks.append(
                Check("coordinator", "fail", "not asked", "give --federation and --enrolment-token-file with it")
            )
            return None
        return self._try("coordinator", self._ask)

    def _ask(self) -> EnrolmentInfo:
        patient, settings = self.patient, self._settings()
        assert patient.enrolment_token_file is not None
        token = read_token(patient.enrolment_token_file, "enrolment token")

        async def ask() -> tuple[EnrolmentInfo, float | None]:
            async with http_to(settings.coordinator, settings.ca_file) as http:
                found = CoordinatorClient(http, settings.coordinator, settings.federation, ANSWER_SECONDS)
                return await found.enrolment(token), found.traffic.clock

        try:
            info, clock = asyncio.run(ask())
        except Refused as refused:
            raise explain(refused, settings) from None
        check_protocol(info)
        text = f"answers, and takes the enrolment token; {info.name} is {info.state}"
        over = info.state in ("finished", "failed", "cancelled")
        advice = "nobody can join it any more: ask the operator for another"
        self.checks.append(Check("coordinator", "fail" if over else "pass", text, advice if over else None))
        self.checks.append(check_clock(clock))
        return info

    def _settings(self) -> Settings:
        """As a client would have them; ClientError where they are wrong (an address, plain HTTP to elsewhere)."""
        patient = self.patient
        named = {"name": patient.name} if patient.name is not None else {}
        where = {"state_dir": patient.state_dir} if patient.state_dir is not None else {}
        return make_settings(
            coordinator=patient.coordinator,
            federation=patient.federation,
            data=patient.data or "none",
            role=patient.role,
            ca_file=patient.ca_file,
            allow_plain_http=patient.allow_plain_http,
            **named,
            **where,
        )

    def _backbone(self, info: EnrolmentInfo | None) -> Backbone | None:
        spec = info.backbone if info is not None else self.patient.backbone

        def load() -> Backbone:
            backbone = open_backbone(spec, self.patient.device, self.patient.allow_backbone)
            check_backbone(backbone, spec)
            return backbone

        backbone = self._try("backbone", load)
        if backbone is not None:
            whose = " as in the federation" if info is not None and spec.fingerprint is not None else ""
            text = f"{spec.model} ({spec.pretrained or 'random'}) loads, {backbone.fingerprint[:19]}...{whose}"
            self.checks.append(Check("backbone", "pass", text))
        return backbone

    def _fits(self, info: EnrolmentInfo, source: Source | None, backbone: Backbone | None) -> None:
        """Whether method, backbone and class names go together; then what would leave the machine is known."""
        method = self._try("method", lambda: make_method(info.method))
        if method is None or backbone is None or source is None:
            return
        self.disclosure = self._try("method", lambda: self._fitted(info, method, source, backbone))
        if self.disclosure is not None:
            self.checks.append(Check("method", "pass", f"{method.name} runs with this backbone and these classes"))

    def _fitted(self, info: EnrolmentInfo, method: Method, source: Source, backbone: Backbone) -> Disclosure:
        check_fits(method, shape_of(backbone))
        known = tuple(info.class_names) if info.class_names else None
        space = method.label_space(known, source.class_names)
        check_classes(source.class_names, space)
        check_domain(method, self.patient.role, source)
        method.check_classes(space)
        method.check_texts(backbone, space, info.template or source.template)
        settings = self._settings()
        request = enrol_request(settings, NOBODY, source, domain_of(source), backbone)
        return disclose(settings.coordinator, info, method, request, list(self.patient.tests))
