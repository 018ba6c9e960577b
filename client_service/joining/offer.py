"""What a federation offers a site, and what the site declares for it: the checks of both, without a coordinator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.http.connection import Refused
from promptfed.client_service.joining.disclosure import Declared
from promptfed.client_service.privacy.agreement import AgreedTerms, terms_of
from promptfed.client_service.privacy.noisy_counts import declared_images
from promptfed.client_service.privacy.policy import Policy
from promptfed.client_service.settings import Settings, read_token
from promptfed.client_service.state.private_state import Identity
from promptfed.client_service.training.data import check_classes, check_domain, domain_of
from promptfed.shared.clip import Backbone, BackboneError, load_backbone, shape_of
from promptfed.shared.clip.loading import expect_device
from promptfed.shared.clip.permission import permits
from promptfed.shared.data import Source
from promptfed.shared.messages import EnrolmentInfo, EnrolRequest, Role
from promptfed.shared.methods import METHODS, make_method
from promptfed.shared.methods.core.interface import Method
from promptfed.shared.methods.core.registry import INSTALL
from promptfed.shared.methods.core.several_labels import is_for_several_labels
from promptfed.shared.secagg.keys import public_identity, sign
from promptfed.shared.service.reasons import first_error
from promptfed.shared.spec.spec import BackboneSpec, SpecError


def choose_device(device: str) -> str:
    """``auto`` is the first CUDA device, else the CPU. Raises ClientError: BACKBONE where torch has no such device."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        expect_device(device)
    except BackboneError as error:
        raise ClientError(Exit.BACKBONE, str(error)) from None
    return device


def describe_device(device: torch.device) -> str:
    """The device as it is declared at enrolment, such as ``cuda (NVIDIA H200)``."""
    return f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type


def open_backbone(spec: BackboneSpec, device: str, allowed: Sequence[str], file: Path | None = None) -> Backbone:
    """The federation's backbone on ``device``; ``allowed`` names what the data owner permits (`permits`).

    ``file`` holds its weights, where the data owner has given one.

    Raises:
        ClientError: BACKBONE where it cannot be loaded or is not permitted.
    """
    try:
        return load_backbone(
            spec.model,
            spec.pretrained,
            precision=spec.precision,
            device=choose_device(device),
            allow_unregistered=permits(allowed, spec),
            weights_file=file,
        )
    except BackboneError as error:
        raise ClientError(Exit.BACKBONE, str(error)) from None


def check_backbone(backbone: Backbone, spec: BackboneSpec) -> None:
    """Refuse other weights than the federation's, before anything is enrolled with them.

    Raises:
        ClientError: BACKBONE.
    """
    if spec.fingerprint is not None and spec.fingerprint != backbone.fingerprint:
        text = f"the backbone {spec.model} ({spec.pretrained}) has other weights here ({backbone.fingerprint[:19]}...)"
        expected = f"than in the federation ({spec.fingerprint[:19]}...)"
        raise ClientError(Exit.BACKBONE, f"{text} {expected}: install the same version of promptfed and of the weights")


def federation_method(info: EnrolmentInfo) -> Method:
    """The federation's method, which has to be installed here: nothing is ever fetched.

    Raises:
        ClientError: PROTOCOL where it is not, or where this machine has another package's method of its name.
    """
    try:
        method = make_method(info.method)
    except (SpecError, KeyError) as error:
        text = f"this client does not have the federation's method as the coordinator describes it: {error}"
        remedy = "install the coordinator's version of promptfed"
        if info.method_package is not None:
            remedy = f"it comes from the package {info.method_package}: {INSTALL.format('it')}"
        raise ClientError(Exit.PROTOCOL, f"{text}: {remedy}") from None
    here, there = METHODS.package(method.name), info.method_package
    if _project(here) != _project(there):
        there, here = (package or "promptfed's own" for package in (there, here))
        text = f"the method {method.name!r} is {there} at the coordinator and {here} here: two methods"
        raise ClientError(Exit.PROTOCOL, f"{text}; install what the coordinator has, if you trust it")
    return method


def _project(package: str | None) -> str | None:
    return package and package.partition("==")[0]


def label_space(method: Method, info: EnrolmentInfo, class_names: tuple[str, ...]) -> tuple[str, ...]:
    """The classes that a client with these ``class_names`` trains over."""
    return method.label_space(tuple(info.class_names) if info.class_names else None, class_names)


def check_declaration(method: Method, info: EnrolmentInfo, role: Role, source: Source) -> None:
    """Refuse unknown classes, images without labels, and a domain without words, where the method needs them.

    Raises:
        ClientError: BAD_INPUT.
    """
    check_classes(source.class_names, label_space(method, info, source.class_names))
    if (source.test.labels.ndim == 2) != is_for_several_labels(method):
        kinds = ("one label per image", "any number of labels per image")
        here, there = kinds if is_for_several_labels(method) else kinds[::-1]
        text = f"the federation {info.name} is for {there}, and {source.uri} has {here}"
        raise ClientError(Exit.BAD_INPUT, f"{text}: give data of that kind, or set the spec's task")
    check_domain(method, role, source)


def enrol_request(declared: Declared, secret: str, backbone: Backbone, identity: bytes | None = None) -> EnrolRequest:
    """What was declared, with the secret and the weights that were loaded; with ``identity``, a key, it signs.

    Raises:
        ClientError: BAD_INPUT where the class names cannot be declared.
    """
    try:
        facts = {key: value for key, value in vars(declared).items() if key != "fingerprint"}
        weights = {"backbone_fingerprint": backbone.fingerprint, "backbone_shape": shape_of(backbone)}
        request = EnrolRequest.model_validate(facts | weights | {"secret": secret})
    except ValidationError as error:
        raise ClientError(Exit.BAD_INPUT, f"the data cannot be declared: {first_error(error)}") from None
    if identity is None:
        return request
    proof = sign(identity, "identity", request.proof_body()).hex()
    return request.model_copy(update={"identity_key": public_identity(identity).hex(), "identity_proof": proof})


def explain(refused: Refused, settings: Settings) -> ClientError:
    """A refusal that ends the client, with what to do about it."""
    where = f"federation {settings.federation} at {settings.coordinator}"
    if refused.kind == "name-taken":
        text = (
            f"the name {settings.name!r} is taken in {where}: give another --name, the --state-dir that enrolled it, "
        )
        return ClientError(Exit.NAME_TAKEN, text + "or ask the operator to reset the name")
    if refused.kind == "withdrawn":
        return ClientError(Exit.WITHDRAWN, f"the operator has withdrawn {settings.name!r} from {where}")
    if refused.status in (401, 403):
        text = f"{where} does not accept this client: {refused.detail}: ask the operator for a new enrolment token"
        return ClientError(Exit.NOT_ALLOWED, text)
    if "backbone" in refused.kind:
        return ClientError(Exit.BACKBONE, f"{where} refuses this backbone: {refused.detail}")
    if "protocol" in refused.kind:
        return ClientError(Exit.PROTOCOL, f"{where} refuses this version: {refused.detail}")
    if refused.kind == "not-found":
        text = f"{settings.coordinator} answers: {refused.detail}, or ask the operator for it"
        return ClientError(Exit.REFUSED, text)
    return ClientError(Exit.REFUSED, f"{where} refuses: {refused}")


def enrolment_token(settings: Settings, identity: Identity) -> str | None:
    """The token. A client that has enrolled needs none, because it has its secret. Raises ClientError."""
    path, enrolled = settings.enrolment_token_file, identity.client_id is not None
    if path is None and not enrolled:
        text = "no enrolment token: give --enrolment-token-file (`promptfed federation token` makes one)"
        raise ClientError(Exit.NOT_ALLOWED, text)
    if path is None or (enrolled and not path.exists()):
        return None
    return read_token(path, "enrolment token")


@dataclass(frozen=True)
class Offer:
    """What a federation offers, and what this site has for it."""

    info: EnrolmentInfo
    method: Method
    source: Source
    tests: Mapping[str, Source]
    policy: Policy | None

    def terms(self, settings: Settings) -> AgreedTerms:
        """What the owner agrees to."""
        return terms_of(self.info, self.method, settings.coordinator, settings.role, list(self.tests))

    def declared(self, settings: Settings, floor: int, backbone: Backbone | None) -> Declared:
        """Everything that the coordinator learns when this client enrols, as far as it is known without a backbone.

        ``floor``: of the number of images that is declared.
        """
        split = self.source.train if settings.role == "trainer" else self.source.test
        device = backbone.device if backbone is not None else torch.device(choose_device(settings.device))
        return Declared(
            name=settings.name,
            role=settings.role,
            num_samples=declared_images(len(split), floor, self.info),
            class_names=self.source.class_names,
            domain=domain_of(self.source),
            device=describe_device(device),
            fingerprint=backbone.fingerprint if backbone is not None else None,
            grey=self.source.grey,
        )

    def check_texts(self, backbone: Backbone, role: Role) -> None:
        """Raise BackboneError where a class name of any data, with the method's own tokens, or the domain's words do
        not fit into the text tower.
        """
        space = label_space(self.method, self.info, self.source.class_names)
        spaces = [(space, self.source.template)]
        spaces += [(test.class_names, test.template) for test in self.tests.values()]
        for names, template in spaces:
            self.method.check_texts(backbone, names, self.info.template or template)
        domain = domain_of(self.source)
        if domain is not None and role == "trainer":
            self.method.check_domain(backbone, space, domain)
