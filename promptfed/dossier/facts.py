"""Facts of a federation's record, or of a site's log: each has a value and the place that it was read from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from promptfed.client_service.state import site_log
from promptfed.sdk import operations
from promptfed.sdk.client import Coordinator
from promptfed.sdk.errors import CommandError, Exit
from promptfed.shared.api.access_schemas import FORGOTTEN, AuditEntry, BrokenChain, check_chain

Row = Mapping[str, Any]
Value = str | int | float | None | Sequence[Row]
INCIDENTS = ("client-withdrawn", "client-reset", "updates-deleted", "federation-pause", FORGOTTEN)
"""Acts of the audit log that are listed."""


@dataclass(frozen=True)
class Fact:
    """A value of the record, a table where it is a list; ``source``: the call or file that holds it."""

    label: str
    value: Value
    source: str


Facts = dict[str, Fact]


@dataclass(frozen=True)
class Record:
    """What a coordinator answered about one federation, as JSON. ``audit``: None for operators who may not read it."""

    federation: Row
    clients: Sequence[Row]
    rounds: Sequence[Row]
    privacy: Row
    public_key: str
    audit: Sequence[AuditEntry] | None


def read_record(api: Coordinator, federation: str) -> Record:
    """Ask the coordinator for the record of a federation. Raises CommandError."""
    view = api.send(operations.get_federation(federation)).json
    result = api.run(operations.accuracies(federation))
    try:
        pages = api.run(operations.audit_log())
        audit = [entry for page in pages for entry in page.view.entries]
    except CommandError as error:
        if error.kind != "wrong-role":
            raise
        audit = None
    return Record(
        federation=view,
        clients=[client for page in api.run(operations.list_clients(federation)) for client in page.json["clients"]],
        rounds=list(result.reports),
        privacy=api.send(operations.get_privacy(federation)).json,
        public_key=str(api.send(operations.get_signing_key()).json["public_key"]),
        audit=audit,
    )


def facts_of(record: Record) -> Facts:
    """All facts of a record, by key."""
    made = {**_federation(record), **_sent(record), **_accuracies(record), **_privacy(record), **_incidents(record)}
    path = f"GET /v1/federations/{record.federation['id']}"
    return {key: Fact(label, value, source.replace("...", path)) for key, (label, value, source) in made.items()}


Made = dict[str, tuple[str, Value, str]]
ELSEWHERE = {
    *("name", "method", "training", "aggregation", "participation", "admission", "retention", "secure_aggregation"),
    *("rounds", "class_names", "backbone", "origin", "licence", "privacy"),
}
"""Fields of the spec that have a fact of their own, or are too long for one."""


def _federation(record: Record) -> Made:
    view, spec = record.federation, record.federation["spec"]
    columns = ("name", "role", "status", "num_samples", "num_classes", "device", "release", "system", "enrolled_at")
    participants = [{column: client[column] for column in columns} for client in record.clients]
    roles = Counter(client["role"] for client in record.clients)
    return {
        "name": ("Federation", view["name"], "..."),
        "id": ("Id", view["id"], "..."),
        "state": ("State", view["state"], "..."),
        "created": ("Created", view["created_at"], "..."),
        "started": ("Started", view["started_at"], "..."),
        "ended": ("Ended", view["ended_at"], "..."),
        "method": ("Method and hyperparameters", _settings(spec["method"]), "... spec.method"),
        "training": ("Training at the sites", _settings(spec["training"]), "... spec.training"),
        "aggregation": ("Aggregation", _settings(spec["aggregation"]), "... spec.aggregation"),
        "participation": ("Participation", _settings(spec["participation"]), "... spec.participation"),
        "settings": (
            "Further settings",
            [{"setting": key, "value": _settings(value)} for key, value in spec.items() if key not in ELSEWHERE],
            "... spec",
        ),
        "admission": ("Limits on updates", _settings(spec["admission"]), "... spec.admission"),
        "retention": ("Retention of updates", spec["retention"], "... spec.retention"),
        "secure": ("Secure sums", _settings(spec.get("secure_aggregation")), "... spec.secure_aggregation"),
        "rounds_planned": ("Rounds agreed", spec["rounds"], "... spec.rounds"),
        "rounds_done": (
            "Rounds completed",
            sum(report["ended_at"] is not None and report["round"] > 0 for report in record.rounds),
            ".../rounds",
        ),
        "classes": ("Classes that the spec names", _settings(spec.get("class_names")), "... spec.class_names"),
        "backbone": ("Backbone", _settings(spec["backbone"]), "... spec.backbone"),
        "fingerprint": ("Digest of the backbone's weights", view["backbone"]["fingerprint"], "... backbone"),
        "origin": ("Started from the export", _settings(spec.get("origin")), "... spec.origin"),
        "licence": ("Licence of the result", spec.get("licence"), "... spec.licence"),
        "state_hash": ("Hash of the present state", view["state_hash"], "..."),
        "states": (
            "States",
            [
                {"round": one["round"], "state_hash": one["state_hash"], "ended_at": one["ended_at"]}
                for one in record.rounds
            ],
            ".../rounds",
        ),
        "public_key": ("Key that signs states and exports", record.public_key, "GET /v1/signing-key"),
        "trainers": ("Trainers", roles["trainer"], ".../clients"),
        "evaluators": ("Evaluators", roles["evaluator"], ".../clients"),
        "images": ("Images that participants declared", sum(one["num_samples"] for one in participants), ".../clients"),
        "participants": ("Participants", participants, ".../clients"),
    }


def _sent(record: Record) -> Made:
    phases = [phase for report in record.rounds for phase in report["phases"]]
    up: Counter[str] = Counter()
    updates: Counter[str] = Counter()
    for update in (update for phase in phases for update in phase["updates"]):
        up[update["client"]] += update["bytes"]
        updates[update["client"]] += 1
    verdicts = Counter(update["verdict"] for phase in phases for update in phase["updates"])
    return {
        "updates": ("Updates that left sites", sum(updates.values()), ".../rounds"),
        "bytes_up": ("Bytes from sites", sum(report["bytes_up"] for report in record.rounds), ".../rounds"),
        "bytes_down": ("Bytes to sites", sum(report["bytes_down"] for report in record.rounds), ".../rounds"),
        "sent_by": (
            "Updates by participant",
            [{"client": name, "updates": updates[name], "bytes": up[name]} for name in sorted(updates)],
            ".../rounds",
        ),
        "verdicts": (
            "Updates by verdict",
            [{"verdict": verdict, "updates": count} for verdict, count in sorted(verdicts.items())],
            ".../rounds",
        ),
    }


def _accuracies(record: Record) -> Made:
    evaluated = [report for report in record.rounds if report["evaluation"] and report["evaluation"]["clients"]]
    last = evaluated[-1] if evaluated else None
    clients = last["evaluation"]["clients"] if last is not None else {}
    rows: list[Row] = []
    for name, told in sorted(clients.items()):
        for split, result in sorted(told["splits"].items()):
            zero = told["zero_shot"].get(split)
            rows.append({"site": name, "split": split, **result, "zero_shot": zero["accuracy"] if zero else None})
    source = f".../rounds/{last['round']}" if last is not None else ".../rounds"
    return {
        "evaluated_round": ("Round of the last evaluation", last["round"] if last is not None else None, source),
        "evaluation": ("Evaluation by site", rows, source),
        "withheld": (
            "Sites that have kept their accuracies",
            sum(bool(told.get("withheld")) for told in clients.values()),
            source,
        ),
        "subgroups": ("Evaluation by subgroup", list(_subgroups(clients)), source),
    }


def _subgroups(clients: Mapping[str, Any]) -> Iterable[Row]:
    for name, told in sorted(clients.items()):
        for group in (told.get("figures") or {}).get("groups", ()):
            accuracy, images = group.get("accuracy"), group.get("images")
            yield {
                "site": name,
                "subgroup": "all" if group.get("column") is None else f"{group['column']}={group.get('value')}",
                "images": None if images is None else f"{images['low']} to {images['high']}",
                "accuracy": None if accuracy is None else accuracy["value"],
                "low": None if accuracy is None else accuracy["low"],
                "high": None if accuracy is None else accuracy["high"],
            }


def _privacy(record: Record) -> Made:
    view = record.privacy
    rows = [
        {name: client[name] for name in ("client", "releases", "epsilon", "epsilon_replace_one", "delta", "noise")}
        for client in view["clients"]
    ]
    central = record.federation.get("privacy")
    return {
        "privacy_level": ("Differential privacy", view["level"], ".../privacy"),
        "privacy_noise": ("Noise multiplier", view["noise_multiplier"], ".../privacy"),
        "privacy_clip": ("Clipping norm", view["clip"], ".../privacy"),
        "epsilon_allowed": ("ε that the spec allows", view["epsilon"], ".../privacy"),
        "epsilon_spent": ("ε of each site's ledger, by its own word", rows, ".../privacy"),
        "epsilon_central": ("ε for whole clients", central["epsilon"] if central else None, "... privacy"),
        "smallest_sum": ("Clients in the smallest secure sum", view["smallest_sum"], ".../privacy"),
        "privacy_warnings": ("Warnings", [{"warning": text} for text in view["warnings"]], ".../privacy"),
    }


def _incidents(record: Record) -> Made:
    stages = [phase for report in record.rounds for phase in report["phases"]]
    stages += [report["evaluation"] for report in record.rounds if report["evaluation"]]
    failed = Counter(failure["type"] for stage in stages for failure in stage["failed"])
    refused = [
        {"client": client["name"], "refusals": client["refusals"], "last": (client["last_refusal"] or {}).get("type")}
        for client in record.clients
        if client["refusals"]
    ]
    made: Made = {
        "failures": (
            "Tasks that failed, by kind",
            [{"type": kind, "tasks": count} for kind, count in sorted(failed.items())],
            ".../rounds",
        ),
        "late": ("Answers that did not come in time", sum(len(stage["expired"]) for stage in stages), ".../rounds"),
        "refusals": ("Requests that were refused, by participant", refused, ".../clients"),
        "withdrawn": ("Withdrawn participants", _withdrawn(record.clients), ".../clients"),
    }
    if record.audit is None:
        return made
    mine = [entry for entry in record.audit if entry.federation == record.federation["id"]]
    acts = [{"at": one.at, "act": one.act, "by": one.actor} for one in mine if one.act in INCIDENTS]
    source = "GET /v1/audit-log"
    return made | {
        "acts": ("Interventions", acts, source),
        "forgotten": ("Forgotten participants", sum(entry.act == FORGOTTEN for entry in mine), source),
        "signed": ("Signed exports", sum(entry.act == "export-signed" for entry in mine), source),
        "audit_entries": ("Entries of the audit log", len(record.audit), source),
        "audit_chain": ("Chain of the audit log", _chain(record.audit), source),
    }


def _withdrawn(clients: Sequence[Row]) -> int:
    return sum(client["status"] == "withdrawn" for client in clients)


def _chain(entries: Sequence[AuditEntry]) -> str:
    try:
        _, head = check_chain(entries)
    except BrokenChain as broken:
        return f"broken: {broken}"
    return f"intact, head {head}"


def _settings(value: Any) -> str | None:
    """A section of the spec as text."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_settings(one)}" for key, one in value.items() if one is not None)
    if isinstance(value, list):
        return ", ".join(str(_settings(one)) for one in value)
    return None if value is None else str(value)


# A site


def facts_of_site(folder: Path) -> Facts:
    """All facts of the site's own log. Raises CommandError where it was changed."""
    try:
        head = site_log.verify(folder)
        lines = site_log.read(folder)
    except site_log.ChangedLog as changed:
        raise CommandError(f"the site log was changed: {changed}", Exit.REFUSED) from None
    by_kind: dict[str, list[Row]] = {}
    for line in lines:
        by_kind.setdefault(str(line["what"]), []).append(line)
    messages: dict[tuple[str, str], list[Row]] = {}
    for one in by_kind.get("sent", []):
        messages.setdefault((str(one["message"]), str(one["to"])), []).append(one)
    sent = [
        {"message": what, "to": to, "messages": len(some), "bytes": sum(line.get("bytes", 0) for line in some)}
        for (what, to), some in sorted(messages.items())
    ]
    refused = [
        {"at": line["at"], "what": line["what"], "why": line.get("detail") or line.get("type")}
        for kind in ("refused", "failed", "discarded", "declined", "withdrawn")
        for line in by_kind.get(kind, [])
    ]
    made: Made = {
        "site_from": ("Log from", str(lines[0]["at"]), ""),
        "site_to": ("Log to", str(lines[-1]["at"]), ""),
        "site_lines": ("Lines", head.n, ""),
        "site_chain": ("Chain of the log", f"intact, head {head.chain}", ""),
        "site_asked": ("Tasks that the coordinator asked for", len(by_kind.get("asked", [])), ""),
        "site_trained": ("Trainings", len(by_kind.get("trained", [])), ""),
        "site_accepted": ("Updates that the coordinator has", len(by_kind.get("accepted", [])), ""),
        "site_evaluated": ("Evaluations", len(by_kind.get("evaluated", [])), ""),
        "site_repeated": ("Times that rounds were repeated", len(by_kind.get("repeated", [])), ""),
        "site_bytes": ("Bytes that left", sum(int(one["bytes"]) for one in sent), ""),
        "site_sent": ("Messages that left", sent, ""),
        "site_consents": ("Answers of the owner", _picked(by_kind, ("agreed", "declined"), "terms", "federation"), ""),
        "site_shown": ("Texts that were shown before", _picked(by_kind, ("shown",), "sha256", "text"), ""),
        "site_refused": ("Refusals, failures, withdrawals", sorted(refused, key=lambda row: str(row["at"])), ""),
    }
    source = str(folder / site_log.FILE)
    return {key: Fact(label, value, source) for key, (label, value, _) in made.items()}


def _picked(by_kind: Mapping[str, Sequence[Row]], kinds: Sequence[str], *columns: str) -> list[Row]:
    lines = [line for kind in kinds for line in by_kind.get(kind, [])]
    lines.sort(key=lambda line: int(line["n"]))
    return [{"at": line["at"], "what": line["what"], **{name: line.get(name) for name in columns}} for line in lines]
