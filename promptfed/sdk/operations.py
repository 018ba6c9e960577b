"""The operator's side of the API: each request with the model of its answer, and operations of several requests.

`Coordinator` and `AsyncCoordinator` send requests (`send`) and carry out operations (`run`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel

from promptfed.sdk.client import Answer, Operation, Request, View
from promptfed.sdk.result import FederationReports, FederationResult
from promptfed.shared.api import api_schemas, report_schemas
from promptfed.shared.api import api_schemas as schemas
from promptfed.shared.api.api_schemas import PrivacyView
from promptfed.shared.api.export_card import Facts
from promptfed.shared.api.report_schemas import ReplayReport
from promptfed.shared.errors import Failed
from promptfed.shared.spec.spec import FederationSpec

Page = TypeVar(
    "Page",
    schemas.FederationPage,
    schemas.ClientPage,
    report_schemas.RoundPage,
    api_schemas.TokenPage,
    api_schemas.OperatorPage,
    api_schemas.AuditPage,
)

Spec = FederationSpec | Mapping[str, Any]  # resolved or not
FEDERATIONS = "/v1/federations"
Verb = Literal["start", "pause", "resume", "cancel"]
ROUNDS_AT_ONCE = 20  # with a thousand clients a report has megabytes
READY = Request("GET", "/readyz", schemas.Health)
REPLAY_SECONDS = 600.0  # seconds that one round may take


def dry_run(spec: Spec) -> Request[schemas.DryRun]:
    """Check a spec without creating a federation; the answer is the resolved spec."""
    return Request("POST", FEDERATIONS, schemas.DryRun, {"json": _sent(spec), "params": {"dry_run": "true"}})


def create(spec: Spec, initial_state: bytes | None = None) -> Operation[Answer[schemas.FederationView]]:
    """Create a federation; ``initial_state`` is a safetensors body, for specs whose state needs a backbone."""
    created = yield from _one(Request("POST", FEDERATIONS, schemas.FederationView, {"json": _sent(spec)}))
    if initial_state is not None:
        yield _upload(f"{FEDERATIONS}/{created.json['id']}/initial-state", schemas.SuppliedState, initial_state)
    return created


def get_federation(federation: str) -> Request[schemas.FederationView]:
    """One federation by its name or id."""
    return Request("GET", f"{FEDERATIONS}/{federation}", schemas.FederationView)


def get_remarks(federation: str) -> Request[schemas.RemarkList]:
    """What looks wrong, and what to try."""
    return Request("GET", f"{FEDERATIONS}/{federation}/remarks", schemas.RemarkList)


def list_federations() -> Operation[list[Answer[schemas.FederationPage]]]:
    """All federations, oldest first."""
    return _pages(FEDERATIONS, schemas.FederationPage)


def steer(federation: str, verb: Verb) -> Request[schemas.FederationView]:
    """Start, pause, resume or cancel a federation."""
    return Request("POST", f"{FEDERATIONS}/{federation}/{verb}", schemas.FederationView)


def delete_federation(federation: str) -> Request[schemas.Nothing]:
    """Delete it with all its data."""
    return Request("DELETE", f"{FEDERATIONS}/{federation}", schemas.Nothing)


def mint_token(federation: str, uses: int = 1, **asked: object) -> Request[api_schemas.MintedToken]:
    """Create an enrolment token for ``uses`` clients; ``asked`` are more fields of `TokenRequest` (None: default)."""
    body = {"uses": uses, **{key: value for key, value in asked.items() if value is not None}}
    return Request("POST", f"{FEDERATIONS}/{federation}/enrolment-tokens", api_schemas.MintedToken, {"json": body})


def list_tokens(federation: str) -> Operation[list[Answer[api_schemas.TokenPage]]]:
    """Enrolment tokens, without their texts."""
    return _pages(f"{FEDERATIONS}/{federation}/enrolment-tokens", api_schemas.TokenPage)


def revoke_token(federation: str, token: str) -> Request[schemas.Nothing]:
    """Revoke an enrolment token by its name or id."""
    return Request("DELETE", f"{FEDERATIONS}/{federation}/enrolment-tokens/{token}", schemas.Nothing)


def mint_operator(name: str, role: str, hours: float | None = None) -> Request[api_schemas.MintedOperator]:
    """Create a token for an operator."""
    body = {"name": name, "role": role, **({"hours": hours} if hours is not None else {})}
    return Request("POST", "/v1/operators", api_schemas.MintedOperator, {"json": body})


def list_operators() -> Operation[list[Answer[api_schemas.OperatorPage]]]:
    """Operators' tokens, without their texts."""
    return _pages("/v1/operators", api_schemas.OperatorPage)


def revoke_operator(operator: str) -> Request[schemas.Nothing]:
    """Revoke an operator's token by its id, or all tokens by the operator's name."""
    return Request("DELETE", f"/v1/operators/{operator}", schemas.Nothing)


def audit_log() -> Operation[list[Answer[api_schemas.AuditPage]]]:
    """The audit log, oldest entry first."""
    return _pages("/v1/audit-log", api_schemas.AuditPage, limit=1000)


def list_clients(federation: str) -> Operation[list[Answer[schemas.ClientPage]]]:
    """The enrolled clients, by name."""
    return _pages(f"{FEDERATIONS}/{federation}/clients", schemas.ClientPage)


def withdraw_client(federation: str, client: str, discard: bool = False) -> Request[schemas.Nothing]:
    """Withdraw a client; ``discard`` also drops its accepted update of the open phase."""
    options = _query(discard="true" if discard else None)
    return Request("DELETE", f"{FEDERATIONS}/{federation}/clients/{client}", schemas.Nothing, options)


def reset_client(federation: str, client: str) -> Request[schemas.ClientView]:
    """Let a client enrol again under its name, with a new secret."""
    return Request("POST", f"{FEDERATIONS}/{federation}/clients/{client}/reset", schemas.ClientView)


def delete_updates(federation: str, client: str) -> Request[schemas.Nothing]:
    """Delete the tensors that a client has sent."""
    return Request("DELETE", f"{FEDERATIONS}/{federation}/clients/{client}/updates", schemas.Nothing)


def get_metrics(federation: str) -> Request[schemas.Nothing]:
    """All numbers by round as CSV, in the answer's ``body``."""
    return Request("GET", f"{FEDERATIONS}/{federation}/metrics", schemas.Nothing)


def get_privacy(federation: str) -> Request[PrivacyView]:
    """The cost of differential privacy and the state of secure sums for each client."""
    return Request("GET", f"{FEDERATIONS}/{federation}/privacy", PrivacyView)


def get_signing_key() -> Request[api_schemas.SigningKey]:
    """The public key under which the coordinator signs states."""
    return Request("GET", "/v1/signing-key", api_schemas.SigningKey)


def reports_after(federation: str, last: int) -> Operation[list[report_schemas.RoundReport]]:
    """Reports of the rounds after round ``last`` (-1: from round 0), also of one that goes on."""
    after = str(last) if last >= 0 else None
    path = f"{FEDERATIONS}/{federation}/rounds"
    pages = yield from _pages(path, report_schemas.RoundPage, after, ROUNDS_AT_ONCE)
    return [report for page in pages for report in page.view.rounds]


def get_rounds(federation: str, after: str | None = None) -> Request[report_schemas.RoundPage]:
    """A page of reports of the rounds after ``after``."""
    return Request(
        "GET", f"{FEDERATIONS}/{federation}/rounds", report_schemas.RoundPage, _query(after=after, limit=ROUNDS_AT_ONCE)
    )


def get_prompts(federation: str, round: int | str = "latest") -> Request[schemas.Nothing]:
    """The global state after a round: a safetensors ``body`` under its hash."""
    return Request("GET", f"{FEDERATIONS}/{federation}/prompts", schemas.Nothing, _query(round=round))


def replay(federation: str, round: int) -> Request[ReplayReport]:
    """Recompute a round."""
    path = f"{FEDERATIONS}/{federation}/rounds/{round}/replay"
    return Request("POST", path, ReplayReport, {"timeout": REPLAY_SECONDS})


def get_card(federation: str, round: int) -> Request[Facts]:
    """What the coordinator knows of the result after ``round``, as an export's card has it."""
    return Request("GET", f"{FEDERATIONS}/{federation}/rounds/{round}/card", Facts)


def sign_card(federation: str, round: int, card: bytes) -> Request[api_schemas.CardSignature]:
    """Let the coordinator sign ``card``, the bytes of an export's ``card.json``, if it agrees with the records."""
    options = {"content": card, "headers": {"Content-Type": "application/json"}, "timeout": REPLAY_SECONDS}
    path = f"{FEDERATIONS}/{federation}/rounds/{round}/card/signature"
    return Request("POST", path, api_schemas.CardSignature, options)


def accuracies(federation: str) -> Operation[FederationReports]:
    """A federation with its reports, without its state and clients."""
    answer = yield from _one(get_federation(federation))
    pages = yield from _pages(f"{FEDERATIONS}/{federation}/rounds", report_schemas.RoundPage, None, ROUNDS_AT_ONCE)
    return FederationReports(answer.json, [report for page in pages for report in page.json["rounds"]])


def take(federation: str, round: int | None = None) -> Operation[FederationResult]:
    """The complete result of a federation after ``round``, by default after the selected or last finished round.

    Raises:
        PromptfedError: the coordinator refuses, or the received state does not have its hash.
    """
    so_far = yield from accuracies(federation)
    reports = so_far.reports
    final_body = b""
    if round is None:
        chosen = so_far.federation.selection if so_far.federation.state == "finished" else None
        last = max((report["round"] for report in reports if report["state_hash"]), default=0)
        round = last if chosen is None else chosen.round
        if round < last:
            final_body, _ = yield from _state(federation, last)
    body, state_hash = yield from _state(federation, round)
    facts = yield from _one(get_card(federation, round))
    until_round = [report for report in reports if report["round"] <= round]
    return FederationResult(so_far.status, until_round, facts.json, round, body, state_hash, final_body)


def _state(federation: str, round: int) -> Operation[tuple[bytes, str]]:
    """A state's bytes and its hash, which they were found to have."""
    answer = yield from _one(get_prompts(federation, round))
    state_hash = answer.headers["etag"].strip('"')
    _check(answer.body, state_hash)
    return answer.body, state_hash


def clients_of(pages: list[Answer[schemas.ClientPage]]) -> list[schemas.ClientView]:
    """All enrolled clients, read page by page."""
    return [client for page in pages for client in page.view.clients]


def _one(request: Request[View]) -> Operation[Answer[View]]:
    answer: Answer[View] = yield request
    return answer


def _pages(
    path: str, page: type[Page], after: str | None = None, limit: int | None = None
) -> Operation[list[Answer[Page]]]:
    """All pages of a list, starting after ``after``."""
    pages: list[Answer[Page]] = []
    while not pages or after is not None:
        pages.append((yield from _one(Request("GET", path, page, _query(after=after, limit=limit)))))
        after = pages[-1].json["next"]
    return pages


def _query(**values: str | int | None) -> dict[str, Any]:
    return {"params": {name: value for name, value in values.items() if value is not None}}


def _upload(path: str, model: type[View], content: bytes) -> Request[View]:
    return Request("PUT", path, model, {"content": content, "headers": {"Content-Type": "application/octet-stream"}})


def _sent(spec: Spec) -> Any:
    """The spec as a mapping. An unresolved spec is sent unchanged, and the coordinator fills in the defaults."""
    return spec.model_dump(mode="json", exclude_unset=True) if isinstance(spec, BaseModel) else spec


def _check(body: bytes, expected: str) -> None:
    from promptfed.shared.tensors import TensorError, decode, state_hash

    try:
        actual = state_hash(decode(body)[0])
    except TensorError as error:
        raise Failed(f"the coordinator's state cannot be read: {error}") from None
    if actual != expected:
        raise Failed(f"the state has the hash {actual}, not {expected}: it was damaged on its way")
