"""The site's side of the airlock: carry out the tasks of a file without a network, and prepare the answers' file."""

from __future__ import annotations

import asyncio
import html
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.http.airlock import AirlockTransport, Answer
from promptfed.client_service.joining.parts import Parts
from promptfed.client_service.privacy.peers import identity_of
from promptfed.client_service.settings import Settings, make_settings
from promptfed.client_service.state.private_state import PrivateState
from promptfed.client_service.worker import Worker
from promptfed.shared.secagg.keys import public_identity
from promptfed.shared.service.airlock import AirlockError, Sealed, public_key, seal, unseal
from promptfed.shared.tensors import TensorError, Tensors
from promptfed.shared.tensors.torch_tensors import decode

NOTE = "airlock.json"  # in the state folder: the last file's number and digest, and the coordinator's key


@dataclass(frozen=True)
class Prepared:
    """What one file of tasks has come to: the answers' file and its inspection sheet, or None if nothing is to leave.

    ``summary``: in words, a line for each tensor or figure.
    """

    answers: bytes | None
    summary: list[str]
    sheet: str


def read_tasks(path: Path, coordinator_key: str | None = None) -> Sealed:
    """The verified file; ``coordinator_key`` (hex) is the key that must have signed it.

    Raises:
        ClientError: BAD_INPUT: it cannot be read, or is not what it should be.
    """
    try:
        sealed = unseal(path.read_bytes(), "tasks", lambda header: public_key(header.get("key")))
        if coordinator_key is not None and sealed.header["key"] != coordinator_key.removeprefix("ed25519:"):
            raise AirlockError(f"another coordinator has signed it: its key is ed25519:{sealed.header['key']}")
        return sealed
    except OSError:
        raise ClientError(Exit.BAD_INPUT, f"{path} cannot be read: give the file that `airlock take` wrote") from None
    except AirlockError as error:
        raise ClientError(Exit.BAD_INPUT, f"{path}: {error}") from None


def settings_for(tasks: Sealed, given: Mapping[str, Any]) -> Settings:
    """The client's settings. Raises ClientError."""
    header = tasks.header
    own = {"coordinator": header["coordinator"], "federation": header["federation"], "name": header["client"]}
    return make_settings(**given, **own, allow_plain_http=True)


def work(tasks: Sealed, settings: Settings, parts: Parts) -> Prepared:
    """Carry out what the file asks for; consent is asked as it is online.

    Raises:
        ClientError: what else ended the client; STATE for an earlier file than the last one, or another coordinator's.
    """
    state = PrivateState(settings.state_dir)
    try:
        private = identity_of(state)
        _expect_next(state, tasks)
    finally:
        state.close()
    transport = AirlockTransport(tasks, public_identity(private), lambda: worker.stop())
    http = httpx.AsyncClient(transport=transport, trust_env=False)
    own = {**{name: getattr(parts, name) for name in Parts.__dataclass_fields__}, "enrolment_token": "airlock"}
    worker = Worker(settings, Parts(**own), http=http)
    asyncio.run(worker.run())
    if transport.answer is None:
        return Prepared(None, [], "")
    return _prepared(tasks, transport.answer, private)


def _expect_next(state: PrivateState, tasks: Sealed) -> None:
    """Refuse files of another coordinator and files before the last one; note this one."""
    text = state.read_note(NOTE)
    try:
        known = json.loads(text) if text is not None else None
        last = None if known is None else (known["number"], known["sha256"], known["key"])
    except (ValueError, KeyError, TypeError):
        raise state.damaged(NOTE) from None
    number, key = tasks.header["number"], tasks.header["key"]
    if last is not None and key != last[2]:
        text = f"the file is signed with another coordinator's key than the earlier ones (ed25519:{last[2]})"
        raise ClientError(Exit.STATE, f"{text}: ask the operator why")
    if last is not None and (number < last[0] or (number == last[0] and tasks.digest != last[1])):
        raise ClientError(Exit.STATE, "this file is older than the last one: use the newest that was taken")
    state.write_note(NOTE, json.dumps({"number": number, "sha256": tasks.digest, "key": key}))


def _prepared(tasks: Sealed, answer: Answer, private: bytes) -> Prepared:
    header = {
        "kind": "answers",
        "federation": tasks.header["federation"],
        "client": tasks.header["client"],
        "key": public_identity(private).hex(),
        "tasks": tasks.digest,
        "request": answer.request,
        "task_id": answer.task_id,
    }
    answers = seal(header, answer.body, Ed25519PrivateKey.from_private_bytes(private).sign)
    summary = _summary(tasks, answer)
    return Prepared(answers, summary, _sheet(header, summary))


def _summary(tasks: Sealed, answer: Answer) -> list[str]:
    about = f"{answer.request}, {len(answer.body):,} bytes"
    if answer.request != "update":
        return [about, *(f"{name}: {value}" for name, value in json.loads(answer.body).items() if name != "secret")]
    try:
        update, about_it = decode(answer.body)
        payload = decode(tasks.body)[0] if tasks.body and not _compresses(tasks) else {}
    except TensorError as error:
        raise ClientError(Exit.FAILED, f"the update cannot be shown: {error}") from None
    told = about_it if isinstance(about_it, dict) else {}
    lines = [about, *(f"{name}: {value}" for name, value in told.items())]
    return lines + [_tensor(name, update, payload) for name in sorted(update)]


def _compresses(tasks: Sealed) -> bool:
    """Whether the update holds encoded changes, which are not to be compared with the payload."""
    task = json.loads(tasks.header["task"] or "null")
    return task is not None and "up" in task["config"].get("compression", {})


def _tensor(name: str, update: Tensors, payload: Tensors) -> str:
    tensor = update[name].double()
    text = f"tensor {name} {tuple(tensor.shape)}, {update[name].nbytes:,} bytes, norm {torch.linalg.norm(tensor):.6g}"
    if name in payload and payload[name].shape == tensor.shape:
        text += f", moved by {torch.linalg.norm(tensor - payload[name].double()):.6g}"
    return text


def _sheet(header: Mapping[str, Any], summary: list[str]) -> str:
    """The page for the person who releases the file."""
    title = f"What leaves {header['client']}"
    facts = [f"{name}: {header[name]}" for name in ("federation", "client", "request", "task_id", "tasks")]
    rows = "".join(f"<li>{html.escape(line)}</li>" for line in (*facts, *summary))
    style = "<style>body{font:16px/1.5 sans-serif;max-width:50em;margin:2em auto}li{overflow-wrap:anywhere}</style>"
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>{style}'
    return f"{head}<h1>{html.escape(title)}</h1><ul>{rows}</ul></html>\n"
