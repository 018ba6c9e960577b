"""`promptfed dossier`: each fact is computed again from the tables or the log; blanks and provisions are there."""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import func, select
from typer.testing import CliRunner, Result

from promptfed.cli.main import app
from promptfed.client_service.state.site_log import FILE, SiteLog
from promptfed.coordinator.store.tables import (
    AuditRow,
    ClientRow,
    EvaluationRow,
    FederationRow,
    PhaseRow,
    StateRow,
    TaskRow,
    UpdateRow,
)
from promptfed.dossier.facts import ELSEWHERE
from promptfed.dossier.kinds import FORMS
from promptfed.dossier.rendering import BLANK, NOT_HELD
from promptfed.sdk.errors import Exit
from promptfed.shared.api.access_schemas import AuditEntry, check_chain
from promptfed.shared.privacy.accounting import training_event
from promptfed.testing.clients import ScriptedClient, drive, trained, update_body
from tests.support.coordinators import InThread, in_thread

SPEC_SECTIONS = ("method", "training", "aggregation", "participation", "admission", "backbone")


GROUPS = [
    {"classes": [], "images": {"low": 20, "high": 20}, "accuracy": {"value": 0.5, "low": 0.3, "high": 0.7}},
    {"column": "sex", "value": "f", "classes": [], "images": {"low": 10, "high": 14}},
]


class Telling(ScriptedClient):
    """Tells figures of subgroups, or where records are protected what its training cost."""

    def evaluate(self, task: dict[str, Any], accuracy: float | None = None) -> httpx.Response:
        if self.name != "north":
            return super().evaluate(task, accuracy)
        figures = {"floor": 10, "groups": GROUPS}
        body = {"splits": {"test": {"accuracy": 0.5, "num_samples": 20, "ece": 0.1}}, "figures": figures}
        return self.http.put(f"{self.path}/tasks/{task['task_id']}/evaluation", json=body, headers=self.headers)


class Protected(ScriptedClient):
    """Trains under noise, by its own word, and keeps its accuracies."""

    def answer(self, task: dict[str, Any]) -> httpx.Response:
        if task["kind"] == "train":
            event = training_event(10, 32, 1, 1.0).as_json()
            spent = {"epsilon": 0.5 + task["round"], "delta": 1e-3, "noise": "secret", "events": [event]}
            tensors = trained(self.payload(task), self.name, task)
            return self.send(task, update_body(tensors, task, privacy=spent, metrics={}))
        url = f"{self.path}/tasks/{task['task_id']}/evaluation"
        return self.http.put(url, json={"splits": {}, "withheld": True}, headers=self.headers)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InThread]:
    with in_thread(tmp_path_factory.mktemp("dossier") / "data") as server:
        yield server


@pytest.fixture(scope="module")
def protected(served: InThread) -> tuple[InThread, str]:
    """A finished federation that protects records."""
    privacy = {"level": "sample", "clip": 0.3, "noise_multiplier": 1.0}
    id = served.create(name="protected", class_names=["circle", "square", "star"], privacy=privacy)
    token = served.token(id)
    clients: list[ScriptedClient] = [Protected(served.http, id, name) for name in ("north", "south")]
    for client in clients:
        assert client.enrol(token).status_code == 201
    served.start(id)
    drive(clients)
    return served, id


@pytest.fixture(scope="module")
def played(served: InThread) -> tuple[InThread, str]:
    """A finished federation in which a task has failed, a client has been withdrawn, and another forgotten."""
    more = {"participation": {"quorum": 0.5}, "keep_rounds": 2}
    id = served.create(rounds=3, class_names=["circle", "square", "star"], **more)
    clients = served.enrol(id, "north", "south", "west", "quokka")
    served.post(f"{id}/start")
    served.post(f"{id}/clients/quokka/forgetting")
    tasks = served.training(clients[:3])
    assert clients[0].fail(tasks[0]).status_code == 200
    served.delete(f"{id}/clients/west")
    drive([Telling(served.http, id, "north"), clients[1]])
    served.until(id, state="finished")
    return served, id


def run(server: InThread, *arguments: str) -> Result:
    token = str(server.settings.data_dir / "operator.token")
    done = CliRunner().invoke(app, ["dossier", *arguments, "--coordinator", server.url, "--token-file", token])
    assert done.exit_code == 0, done.output
    return done


@pytest.mark.parametrize("which", ["played", "protected"])
def test_each_fact_is_computed_again_from_the_tables(
    which: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    server, id = request.getfixturevalue(which)
    output = run(server, id, "--json", "--out", str(tmp_path / "draft.md")).output
    facts = {key: fact["value"] for key, fact in json.loads(output[output.index("{") :]).items()}
    assert all(fact["source"] for fact in json.loads(output[output.index("{") :]).values())
    with server.registry.database.read() as session:
        expected = expected_facts(session, id)
    expected["public_key"] = server.get("/v1/signing-key")["public_key"]
    spec = server.get(id)["spec"]
    further = {row["setting"]: row["value"] for row in facts.pop("settings")}
    assert further.get("keep_rounds") == ("2" if which == "played" else None)
    assert further.keys() | ELSEWHERE >= spec.keys(), "no field of the spec is left out"
    for section in SPEC_SECTIONS:
        told = facts.pop(section)
        for leaf in leaves(spec[section]):
            assert str(leaf) in told, (section, leaf)
    assert facts.keys() == expected.keys()
    for key, value in expected.items():
        told = json.loads(re.sub(r"(\.\d{3})000Z", r"\1Z", json.dumps(facts[key])))  # the API's times have microseconds
        assert told == value, key


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for one in value.values():
            yield from leaves(one)
    elif value is not None:
        yield value


def expected_facts(session: Any, id: str) -> dict[str, Any]:
    """All facts but sections of the spec, by queries of their own."""
    row = session.get_one(FederationRow, id)
    clients = list(session.scalars(select(ClientRow).where(ClientRow.federation_id == id).order_by(ClientRow.name)))
    tasks = list(
        session.execute(
            select(TaskRow, PhaseRow).join(PhaseRow, PhaseRow.id == TaskRow.phase_id).where(TaskRow.federation_id == id)
        )
    )
    updates = list(
        session.execute(
            select(TaskRow.client, UpdateRow.bytes, TaskRow.counted)
            .join(UpdateRow, UpdateRow.task_id == TaskRow.id)
            .where(TaskRow.federation_id == id)
        )
    )
    last = session.scalar(
        select(func.max(PhaseRow.round)).where(PhaseRow.kind == "evaluate", PhaseRow.federation_id == id)
    )
    answers = {
        task.client: session.get_one(EvaluationRow, task.id).body
        for task, phase in tasks
        if phase.kind == "evaluate" and phase.round == last and task.status == "answered"
    }
    audit = [AuditEntry.model_validate(one, from_attributes=True) for one in session.scalars(select(AuditRow))]
    mine = [entry for entry in audit if entry.federation == id]
    states: dict[int, Any] = {}
    for state in session.scalars(select(StateRow).where(StateRow.federation_id == id).order_by(StateRow.id)):
        states[state.round] = state.state_hash
    sent, sizes = Counter(name for name, _, _ in updates), Counter[str]()
    for name, size, _ in updates:
        sizes[name] += size
    up = sum(sizes.values())
    verdicts = Counter("counted" if counted else "discarded" for _, _, counted in updates)
    return {
        "name": row.name,
        "id": id,
        "state": row.state,
        "created": row.created_at,
        "started": row.started_at,
        "ended": row.ended_at,
        "retention": "all",
        "secure": None,
        "rounds_planned": row.spec["rounds"],
        "rounds_done": max(states),
        "classes": "circle, square, star",
        "fingerprint": row.fingerprint,
        "origin": None,
        "licence": None,
        "state_hash": states[max(states)],
        "states": [
            {"round": round, "state_hash": states.get(round, states[0]), "ended_at": ended(session, id, round)}
            for round in range(max(states) + 1)
        ],
        "trainers": len(clients),
        "evaluators": 0,
        "images": sum(client.num_samples for client in clients),
        "participants": [
            {
                "name": client.name,
                "role": client.role,
                "status": "active" if client.active else "withdrawn",
                "num_samples": client.num_samples,
                "num_classes": len(client.class_names),
                "device": client.device,
                "release": None,
                "system": None,
                "enrolled_at": client.enrolled_at,
            }
            for client in clients
        ],
        "updates": len(updates),
        "bytes_up": up,
        "bytes_down": sum(task.bytes_down for task, _ in tasks),
        "sent_by": [{"client": name, "updates": sent[name], "bytes": sizes[name]} for name in sorted(sent)],
        "verdicts": [{"verdict": verdict, "updates": count} for verdict, count in sorted(verdicts.items())],
        "evaluated_round": last,
        "evaluation": [
            {
                "site": name,
                "split": "test",
                **body["splits"]["test"],
                "zero_shot": body["zero_shot"]["test"]["accuracy"] if body.get("zero_shot") else None,
            }
            for name, body in sorted(answers.items())
            if body["splits"]
        ],
        "withheld": sum(body.get("withheld", False) for body in answers.values()),
        "subgroups": [
            {
                "site": name,
                "subgroup": "sex=f" if "column" in group else "all",
                "images": f"{group['images']['low']} to {group['images']['high']}",
                **{
                    key: group["accuracy"][kind] if "accuracy" in group else None
                    for key, kind in (("accuracy", "value"), ("low", "low"), ("high", "high"))
                },
            }
            for name in sorted(answers)
            if answers[name].get("figures")
            for group in GROUPS
        ],
        **expected_privacy(session, id, row.spec.get("privacy"), [client.name for client in clients]),
        "failures": [
            {"type": kind, "tasks": count}
            for kind, count in sorted(Counter(task.failure["type"] for task, _ in tasks if task.failure).items())
        ],
        "late": sum(task.status == "expired" for task, _ in tasks),
        "refusals": [
            {"client": client.name, "refusals": client.refusals, "last": client.last_refusal["type"]}
            for client in clients
            if client.refusals
        ],
        "withdrawn": sum(not client.active for client in clients),
        "acts": [
            {"at": entry.at, "act": entry.act, "by": entry.actor}
            for entry in mine
            if entry.act in ("client-withdrawn", "client-forgotten")
        ],
        "forgotten": sum(entry.act == "client-forgotten" for entry in mine),
        "signed": 0,
        "audit_entries": len(audit),
        "audit_chain": f"intact, head {check_chain(audit)[1]}",
    }


def expected_privacy(session: Any, id: str, given: Any, names: list[str]) -> dict[str, Any]:
    """The facts of differential privacy."""
    spent = []
    for name in names if given else ():
        query = select(UpdateRow.metrics).join(TaskRow, TaskRow.id == UpdateRow.task_id)
        mine = query.where(TaskRow.federation_id == id, TaskRow.client == name).order_by(UpdateRow.received_at)
        metrics = list(session.scalars(mine))
        last = {"releases": len(metrics), "epsilon": metrics[-1]["privacy_epsilon"], "epsilon_replace_one": None}
        spent.append({"client": name, **last, "delta": metrics[-1]["privacy_delta"], "noise": "secret"})
    plain = "nothing is protected: whoever has the prompts or an update can test for a training image"
    silent = f"an older version, which tells no plan of its training: {', '.join(names)}"
    return {
        "privacy_level": "sample" if given else "none",
        "privacy_noise": given["noise_multiplier"] if given else None,
        "privacy_clip": given["clip"] if given else None,
        "epsilon_allowed": given.get("epsilon") if given else None,
        "epsilon_spent": spent,
        "epsilon_central": None,
        "smallest_sum": None,
        "privacy_warnings": [{"warning": silent if given else plain}],
    }


def ended(session: Any, id: str, round: int) -> str | None:
    phases = select(func.max(PhaseRow.completed_at)).where(PhaseRow.federation_id == id, PhaseRow.round == round)
    value = session.scalar(phases)
    return str(value) if value is not None else None


@pytest.mark.parametrize("kind", FORMS)
def test_both_formats_hold_the_checklist_and_the_blanks(
    played: tuple[InThread, str], tmp_path: Path, kind: str
) -> None:
    server, id = played
    markdown = run(server, id, "--kind", kind).output
    run(server, id, "--kind", kind, "--format", "html", "--out", str(tmp_path / "draft.html"))
    page = html.unescape(re.sub(r"<[^>]+>", " ", (tmp_path / "draft.html").read_text()))
    form = FORMS[kind]
    blanks = [blank for section in form.sections for blank in section.blanks]
    for text in (markdown.replace("\\", ""), page):
        assert text.count(BLANK) >= len(blanks)
        for wanted in (*blanks, *(one for section in form.sections for one in section.provisions), form.law):
            assert wanted in text
        assert NOT_HELD in text


def test_every_key_of_a_form_is_a_fact(played: tuple[InThread, str], tmp_path: Path) -> None:
    server, id = played
    output = run(server, id, "--json", "--out", str(tmp_path / "draft.md")).output
    SiteLog(tmp_path).note("asked", {"task": "t"})
    of_site = CliRunner().invoke(app, ["dossier", "--site", str(tmp_path), "--json"]).output
    known = {*json.loads(output[output.index("{") :]), *json.loads(of_site[of_site.index("{") :])}
    asked = {key for form in FORMS.values() for section in form.sections for key in section.facts}
    assert asked - known == set()
    assert known - asked == set()


def test_a_sites_own_log_is_enough(tmp_path: Path) -> None:
    log = SiteLog(tmp_path)
    log.note("shown", {"terms": "abc", "sha256": "sha256:1", "text": "Two tensors <leave>."})
    log.note("agreed", {"terms": "abc", "federation": "eyes"})
    for round in (1, 2):
        log.note("asked", {"round": round})
        log.note("trained", {"round": round, "loss": 0.5})
        log.note("sent", {"message": "update", "to": "https://c", "bytes": 1000 * round})
    log.note("accepted", {"round": 1})
    log.note("refused", {"detail": "too late"})
    done = CliRunner().invoke(app, ["dossier", "--site", str(tmp_path), "--json"])
    facts = {key: fact["value"] for key, fact in json.loads(done.output).items()}
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    counts = Counter(line["what"] for line in lines)
    assert facts == {
        "site_from": lines[0]["at"],
        "site_to": lines[-1]["at"],
        "site_lines": len(lines),
        "site_chain": f"intact, head {lines[-1]['chain']}",
        "site_asked": counts["asked"],
        "site_trained": counts["trained"],
        "site_accepted": counts["accepted"],
        "site_evaluated": 0,
        "site_repeated": 0,
        "site_bytes": 3000,
        "site_sent": [{"message": "update", "to": "https://c", "messages": 2, "bytes": 3000}],
        "site_consents": [{"at": lines[1]["at"], "what": "agreed", "terms": "abc", "federation": "eyes"}],
        "site_shown": [{"at": lines[0]["at"], "what": "shown", "sha256": "sha256:1", "text": "Two tensors <leave>."}],
        "site_refused": [{"at": lines[-1]["at"], "what": "refused", "why": "too late"}],
    }
    page = CliRunner().invoke(app, ["dossier", "--site", str(tmp_path), "--format", "html"]).output
    assert "Two tensors &lt;leave&gt;." in page
    (tmp_path / FILE).write_text("".join(f"{json.dumps(line)}\n" for line in lines[:-1]))
    broken = CliRunner().invoke(app, ["dossier", "--site", str(tmp_path)])
    assert broken.exit_code == Exit.REFUSED
