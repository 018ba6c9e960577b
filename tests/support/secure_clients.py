"""Fakes that take part in secure sums with a real client's part of them, on a state folder of their own."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import httpx

from promptfed.client_service.exits import Failure
from promptfed.client_service.privacy.identity import identity_of
from promptfed.client_service.privacy.secure import SecureWork, Trained
from promptfed.client_service.state.private_state import PrivateState, TensorOrigin
from promptfed.shared.messages import EnrolRequest, SpendReport, Task
from promptfed.shared.secagg.keys import public_identity, sign
from promptfed.shared.tensors.torch_tensors import decode
from promptfed.testing.clients import ScriptedClient, content_digest, enrolment, trained


class SecureClient(ScriptedClient):
    """``work`` is the real client's; training is the fakes' deterministic one."""

    def __init__(self, http: httpx.Client, federation: str, name: str, accuracy: float = 0.5):
        super().__init__(http, federation, name, accuracy)
        self.state = PrivateState(Path(tempfile.mkdtemp(prefix="secure-")), ephemeral=True)
        self.secure = SecureWork(self.state, federation)
        self.trained = 0
        self.spent: SpendReport | None = None
        self.withheld = False
        self.bodies: list[bytes] = []

    def enrol(self, token: str, **changes: Any) -> httpx.Response:
        asked = {name: value for name, value in changes.items() if not name.startswith("identity")}
        request = EnrolRequest.model_validate(enrolment(self.name, **asked))
        private = identity_of(self.state)
        self.secure.samples = request.num_samples
        signed = {
            "identity_key": public_identity(private).hex(),
            "identity_proof": sign(private, "identity", request.proof_body()).hex(),
        }
        return super().enrol(token, **(signed | changes))

    def answer(self, task: dict[str, Any]) -> httpx.Response:
        if task["kind"] == "evaluate" and self.withheld:
            url = f"{self.path}/tasks/{task['task_id']}/evaluation"
            return self.http.put(url, json={"splits": {}, "withheld": True}, headers=self.headers)
        if task["kind"] == "evaluate":
            return super().answer(task)
        told = self.http.get(task["payload"]["url"], headers=self.headers)
        told.raise_for_status()
        try:
            body = self.prepared(Task.model_validate(task), told.content)
        except Failure as failure:
            report = {"type": failure.kind, "detail": str(failure)}
            return self.http.post(f"{self.path}/tasks/{task['task_id']}/failure", json=report, headers=self.headers)
        response = self.exchange(task, body)
        if task["kind"] == "unmask" and response.status_code == 409:
            return httpx.Response(200)  # the sum was opened by others' shares
        return response

    def prepared(self, task: Task, told: bytes) -> bytes:
        """The answer to a task, as it is stored."""
        self.secure.settle(task)
        self.secure.expect(task)
        if task.kind == "train":
            if not self.secure.is_trained(task):
                payload = decode(told)[0]
                self.trained += 1
                update = trained(payload, self.name, {"round": task.round, "phase": task.phase})
                about = TensorOrigin(task.task_id, task.round)
                private = {"own": next(iter(update.values())) * 0 + task.round}
                self.secure.keep(task, payload, Trained(update, private, about, {}, self.spent))
            answer = self.secure.keys(task)
        else:
            answer = self.secure.answer(task, told)
        self.bodies.append(answer.body)
        return answer.body

    def exchange(self, task: dict[str, Any], body: bytes) -> httpx.Response:
        url = f"{self.path}/tasks/{task['task_id']}/exchange"
        response = self.http.put(url, content=body, headers={**self.headers, "Content-Digest": content_digest(body)})
        last = self.secure.unsent()
        if response.status_code in (200, 201) and last is not None:
            self.secure.note_accepted(last)
        return response
