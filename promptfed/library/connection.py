"""`promptfed.connect`: federations at a coordinator, from a notebook or a program."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any, Self

from promptfed.library.result import Result
from promptfed.sdk import operations
from promptfed.sdk.client import DEFAULT_URL, URL_VARIABLE, CommandError, Coordinator, Exit, open_coordinator
from promptfed.sdk.progress import Snapshot, Watcher, follow
from promptfed.shared.spec.spec import AllowedBackbones


def connect(url: str | None = None, *, token: str | None = None, token_file: Path | str | None = None) -> Connection:
    """A coordinator at ``url`` (default: $PROMPTFED_COORDINATOR, else loopback's port 8080) with its operator token.

    Of a group of coordinators ``url`` may name several, separated by commas.

    The token is ``token``, or that of ``token_file``, or $PROMPTFED_OPERATOR_TOKEN.

    Raises:
        CommandError: there is no token.

    Example:
        >>> with promptfed.connect(token_file="run/coordinator/operator.token") as coordinator:
        ...     federation = coordinator.create("promptfl", "styles", rounds=3)
        ...     print(federation.enrolment_token())
    """
    if token is not None:
        return Connection(Coordinator(url or os.environ.get(URL_VARIABLE) or DEFAULT_URL, token))
    return Connection(open_coordinator(url, Path(token_file) if token_file is not None else None))


class Connection:
    """One coordinator as its operator sees it; close it, or use it in a ``with`` block."""

    def __init__(self, api: Coordinator):
        self._api = api

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._api.close()

    def create(
        self, method: str | dict[str, Any], name: str, *, allow_backbone: AllowedBackbones = False, **spec: Any
    ) -> Federation:
        """Create a federation; ``spec`` has the further keys of its spec. The backbone is loaded here, for its
        fingerprint.

        Raises:
            CommandError: the spec or the backbone is wrong, or the coordinator refuses.
        """
        from promptfed.sdk.backbone import resolve, with_backbone

        named = {"name": method} if isinstance(method, str) else method
        asked = spec | {"name": name, "method": named}
        resolved, initial_state = with_backbone(resolve(asked), allow_backbone)
        asked["backbone"] = resolved.backbone.model_dump(mode="json", exclude_unset=True)
        created = self._api.run(operations.create(asked, initial_state))
        return Federation(self._api, created.json["id"], allow_backbone)

    def federation(self, name: str) -> Federation:
        """The federation of that name or id. Raises CommandError if there is none."""
        return Federation(self._api, self._api.send(operations.get_federation(name)).json["id"])

    def federations(self) -> list[Federation]:
        """All federations."""
        pages = self._api.run(operations.list_federations())
        return [Federation(self._api, view["id"]) for page in pages for view in page.json["federations"]]


class Federation:
    """One federation at a coordinator. Every call asks the coordinator; every refusal is a CommandError."""

    def __init__(self, api: Coordinator, id: str, allow_backbone: AllowedBackbones = False):
        self._api, self.id, self._allow = api, id, allow_backbone

    def __repr__(self) -> str:
        view = self._api.send(operations.get_summary(self.id)).view
        return f"<Federation {view.name}: {view.state}, round {view.round} of {view.spec.rounds}>"

    def status(self) -> dict[str, Any]:
        """What ``GET /v1/federations/{id}`` answers: resolved spec, state, round, who is awaited."""
        status: dict[str, Any] = self._api.send(operations.get_federation(self.id)).json
        return status

    @property
    def state(self) -> str:
        """``enrolling``, ``running``, ``paused``, ``finished``, ``failed`` or ``cancelled``."""
        return str(self.status()["state"])

    def clients(self) -> list[dict[str, Any]]:
        """The enrolled clients."""
        pages = self._api.run(operations.list_clients(self.id))
        return [client for page in pages for client in page.json["clients"]]

    def enrolment_token(self, uses: int = 1) -> str:
        """A fresh token with which ``uses`` clients can enrol."""
        return self._api.send(operations.mint_token(self.id, uses)).view.token

    def start(self) -> Self:
        """Start the rounds, and confirm the backbone that the first client enrolled with."""
        return self._steer("start")

    def pause(self) -> Self:
        """Pause: no client is asked until `resume`."""
        return self._steer("pause")

    def resume(self) -> Self:
        """Resume after a pause."""
        return self._steer("resume")

    def cancel(self) -> Self:
        """End for good."""
        return self._steer("cancel")

    def wait(self, seconds: float | None = None, *, progress: bool | None = None) -> Result:
        """Wait until it has finished; its result.

        Raises:
            CommandError: it ended otherwise, or ``seconds`` have passed.
        """
        end = time.monotonic() + seconds if seconds is not None else None

        def look() -> None:
            if end is not None and time.monotonic() > end:
                raise CommandError(f"the federation has not finished in {seconds:g} s", Exit.FAILED)

        quiet = not (sys.stderr.isatty() if progress is None else progress)
        with Watcher(quiet=quiet) as watcher:
            snapshot: Snapshot | None = None
            for snapshot in follow(self._api, self.id, look):
                watcher.show(snapshot)
        if snapshot is None or snapshot.state != "finished":
            state = snapshot.describe() if snapshot is not None else "unknown"
            raise CommandError(f"the federation is {state}", Exit.FEDERATION_ENDED_BADLY)
        return self.result()

    def result(self, round: int | None = None) -> Result:
        """Its result after ``round``, or after its last finished one."""
        taken = self._api.run(operations.take(self.id, round))
        return Result(taken, allow_backbone=self._allow, coordinator=self._api)

    def _steer(self, verb: operations.Verb) -> Self:
        self._api.send(operations.steer(self.id, verb))
        return self
