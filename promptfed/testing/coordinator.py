"""A coordinator in the test's own process, called through FastAPI's ``TestClient``: no socket, no subprocess."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import httpx
from fastapi.testclient import TestClient
from pydantic import ValidationError

from promptfed.coordinator.app import create_app
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.settings import Settings
from promptfed.sdk.arguments import all_checked, checked
from promptfed.shared.errors import BadInput
from promptfed.shared.spec.spec import SpecError
from promptfed.testing.clients import PATIENCE, ScriptedClient, bearer, spec


@all_checked
class OperatorCalls:
    """The operator's calls to a coordinator, and scripted clients of the same coordinator.

    Every call checks the status of the answer and fails with the answer's text if it is another one.

    Attributes:
        http: the client that sends the requests.
        operator: the operator's ``Authorization`` header.
    """

    http: httpx.Client
    operator: dict[str, str]

    def get(self, path: str, status: int = 200, **options: Any) -> Any:
        """The JSON at ``path``. A path without a leading slash is below ``/v1/federations/``."""
        return self._call("GET", path, status, **options)

    def post(self, path: str, json: Any = None, status: int = 200, **options: Any) -> Any:
        """The JSON that ``path`` answers."""
        return self._call("POST", path, status, json=json, **options)

    def delete(self, path: str, status: int = 204) -> Any:
        """Delete the resource at ``path``."""
        return self._call("DELETE", path, status)

    def _call(self, verb: str, path: str, status: int, **options: Any) -> Any:
        options["headers"] = self.operator | options.get("headers", {})
        response = self.http.request(verb, path if path.startswith("/") else f"/v1/federations/{path}", **options)
        assert response.status_code == status, response.text
        return response.json() if response.content else None

    def create(self, **changes: Any) -> str:
        """Create a federation from `promptfed.testing.spec` with ``changes``; return its id."""
        return str(self.post("/v1/federations", spec(**changes), status=201)["id"])

    def token(self, federation: str, uses: int | None = None, **asked: Any) -> str:
        """A new enrolment token, for 1,000 clients by default; one ``client``'s has one use."""
        uses = 1000 if uses is None and "client" not in asked else uses
        asked |= {} if uses is None else {"uses": uses}
        return str(self.post(f"{federation}/enrolment-tokens", asked, status=201)["token"])

    def client(self, federation: str, name: str) -> ScriptedClient:
        """A scripted client. It may have enrolled before: its secret follows from its name."""
        return ScriptedClient(self.http, federation, name)

    def enrol(self, federation: str, *names: str, **changes: Any) -> list[ScriptedClient]:
        """Newly enrolled clients; ``changes`` are fields of the enrolment."""
        token = self.token(federation)
        clients = [self.client(federation, name) for name in names]
        for client in clients:
            response = client.enrol(token, **changes)
            assert response.status_code == 201, response.text
        return clients

    def start(self, federation: str) -> Any:
        """Start the federation."""
        return self.post(f"{federation}/start")

    def until(self, federation: str, seconds: float = PATIENCE, **wanted: Any) -> Any:
        """Wait until the federation's fields have the ``wanted`` values, as in ``state="finished"``; return it."""
        end = time.monotonic() + seconds
        while True:
            report = self.get(federation)
            if all(report[key] == value for key, value in wanted.items()):
                return report
            assert time.monotonic() < end, f"{wanted} does not come; it is {report}"
            time.sleep(0.01)

    def task(self, client: ScriptedClient, wait: float = 20.0) -> dict[str, Any]:
        """Wait for the client's next task, with long polls of at most ``wait`` seconds."""
        end = time.monotonic() + PATIENCE
        while (response := client.task(wait)).status_code == 204:
            assert time.monotonic() < end, f"no task comes for {client.name}"
        assert response.status_code == 200, response.text
        task: dict[str, Any] = response.json()
        return task

    def training(self, clients: Sequence[ScriptedClient]) -> list[dict[str, Any]]:
        """Answer all evaluations; return each client's training task."""
        tasks = []
        for client in clients:
            task = self.task(client)
            if task["kind"] == "evaluate":
                assert client.evaluate(task).status_code == 201
        for client in clients:
            tasks.append(self.task(client))
            assert tasks[-1]["kind"] == "train"
        return tasks


class RealCoordinator(OperatorCalls):
    """The real application with its store in ``folder``; a subclass serves it.

    Args:
        folder: the data folder; a second coordinator on the same folder continues where the first stopped.
        **options: fields of `promptfed.coordinator.settings.Settings`.
    """

    def __init__(self, folder: Path | str, **options: Any):
        folder = Path(folder)
        try:
            self.settings = Settings(data_dir=folder, **options)
        except ValidationError as error:
            raise BadInput(str(SpecError.from_validation(error))) from None
        self.app = create_app(self.settings)
        self.http = self.serve()
        token = self.settings.operator_token_file or folder / "operator.token"
        self.operator = bearer(token.read_text().strip())

    def serve(self) -> httpx.Client:
        """Start ``app``; a client that reaches it. The operator's token is written by then."""
        raise NotImplementedError

    @property
    def registry(self) -> Registry:
        """The federations in memory, for tests that look inside."""
        registry: Registry = self.app.state.registry
        return registry


class StoppedClient(httpx.Client):
    """The client of a coordinator that has stopped: no call reaches it."""

    def __init__(self) -> None:
        # Without a transport of its own httpx would read all certificates for it, in 20 ms.
        super().__init__(base_url="http://stopped.invalid", transport=httpx.MockTransport(_refuse))


def _refuse(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("the coordinator has stopped", request=request)


class LocalCoordinator(RealCoordinator):
    """A coordinator in this process, with its real store in ``folder``."""

    def serve(self) -> httpx.Client:
        """Start ``app`` behind FastAPI's ``TestClient``."""
        self._client = TestClient(self.app, raise_server_exceptions=False)
        self._client.__enter__()
        # Where the library httpx2 is installed, TestClient is its client, which has the same interface.
        return cast(httpx.Client, self._client)

    def stop(self) -> None:
        """Stop the coordinator and close its store. A second call does nothing."""
        if not isinstance(self.http, StoppedClient):
            self._client.__exit__(None, None, None)
            self.http = StoppedClient()


@contextmanager
@checked
def local_coordinator(folder: Path | str, **options: Any) -> Iterator[LocalCoordinator]:
    """A coordinator that runs for the length of the block."""
    coordinator = LocalCoordinator(folder, **options)
    try:
        yield coordinator
    finally:
        coordinator.stop()
