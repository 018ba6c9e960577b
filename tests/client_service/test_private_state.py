"""The state folder: identity, the all-or-nothing of an update, and what a kill at any instant leaves."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.state.private_state import Pending, PrivateState, Serving, TensorOrigin
from promptfed.shared.messages import TaskConfig
from tests.client_service.conftest import Killed

ROUND_1 = TensorOrigin("task-1", 1, "train", "peers")
ROUND_2 = TensorOrigin("task-2", 2, "train", "peers")


def vector(value: float) -> dict[str, torch.Tensor]:
    return {"v": torch.full((3,), value)}


def kill_at(patch: pytest.MonkeyPatch, step: int) -> None:
    """Let the ``step``-th durable file operation from now on not happen, nor any after it."""
    done = 0

    def guarded(real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any, **options: Any) -> Any:
            nonlocal done
            done += 1
            if done >= step:
                raise Killed
            return real(*arguments, **options)

        return operation

    for name in ("open", "rename", "replace", "unlink", "rmdir", "mkdir"):
        patch.setattr(os, name, guarded(getattr(os, name)))


def killed_in(state: PrivateState, change: Callable[[PrivateState], None], step: int) -> bool:
    """Whether ``change`` completed before its ``step``-th durable file operation killed it; the state is closed."""
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, step)
        try:
            change(state)
            completed = True
        except Killed:
            completed = False
    state.close()
    return completed


def survives(folder: Path, change: Callable[[PrivateState], None], look: Callable[[PrivateState], Any]) -> list[Any]:
    """What ``look`` finds after ``change`` was killed at its first, second, ... file operation, until it completes."""
    seen = []
    for step in range(1, 200):
        where = folder / str(step)
        state = PrivateState(where)
        state.write_pending(b"first", vector(1.0), ROUND_1)
        state.commit()
        state.write_pending(b"second", vector(2.0), ROUND_2)
        completed = killed_in(state, change, step)
        again = PrivateState(where)
        seen.append(look(again))
        again.close()
        if completed:
            return seen
    raise AssertionError("the change never completed")


def committed_and_pending(state: PrivateState) -> tuple[float, str | None, bytes | None]:
    tensors, provenance = state.committed()
    pending = state.pending()
    return float(tensors["v"][0]), provenance.task_id, pending.update.read() if pending else None


def test_a_kill_while_committing_leaves_the_state_before_or_after(tmp_path: Path) -> None:
    before, after = (1.0, "task-1", b"second"), (2.0, "task-2", None)
    seen = survives(tmp_path, lambda state: state.commit(), committed_and_pending)
    assert set(seen) == {before, after}
    assert seen == sorted(seen, key=lambda found: found == after)
    assert len(seen) > 3


def test_a_kill_while_discarding_leaves_the_update_whole_or_gone(tmp_path: Path) -> None:
    seen = survives(tmp_path, lambda state: state.discard(), committed_and_pending)
    assert set(seen) == {(1.0, "task-1", b"second"), (1.0, "task-1", None)}


def test_a_kill_while_writing_an_update_leaves_it_whole_or_absent(tmp_path: Path) -> None:
    def change(state: PrivateState) -> None:
        state.write_pending(b"third", vector(3.0), TensorOrigin("task-3", 3, "train", "peers"))

    seen = []
    for step in range(1, 200):
        where = tmp_path / str(step)
        state = PrivateState(where)
        completed = killed_in(state, change, step)
        again = PrivateState(where)
        pending = again.pending()
        seen.append(pending.update.read() if pending else None)
        if pending:
            again.commit()
            assert again.committed()[0]["v"].tolist() == [3.0] * 3
        again.close()
        if completed:
            break
    assert set(seen) == {None, b"third"}


def test_a_kill_while_keeping_a_payload_leaves_one_that_can_be_served(tmp_path: Path) -> None:
    config = TaskConfig.model_validate(
        {
            "method": {"name": "promptfl"}, "training": {}, "backbone": {}, "class_names": None, "template": "{}",
            "rounds": 2, "seed": 0, "peers": [],
        }
    )  # fmt: skip

    def change(state: PrivateState) -> None:
        state.save_serving(Serving(2, "train", config, b"new payload"))

    state = PrivateState(tmp_path / "x")
    state.save_serving(Serving(1, "train", config, b"old payload"))
    state.close()
    found = set()
    for step in range(1, 30):
        completed = killed_in(PrivateState(tmp_path / "x"), change, step)
        state = PrivateState(tmp_path / "x")
        serving = state.serving()
        assert serving is not None
        found.add((serving.round, serving.payload))
        state.close()
        if completed:
            break
    assert found == {(1, b"old payload"), (2, b"new payload")}
    assert len(list((tmp_path / "x").glob("serving-*.safetensors"))) == 1


def test_the_identity_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    state = PrivateState(tmp_path / "s")
    first = state.identity("a", "trainer")
    assert len(bytes.fromhex(first.secret)) == 32
    first = state.bind(first, "fed-1", "client-1")
    assert state.identity("a", "trainer") == first
    assert stat.S_IMODE((tmp_path / "s" / "identity.json").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o700


@pytest.mark.parametrize(("name", "role"), [("b", "trainer"), ("a", "evaluator")])
def test_a_folder_of_another_client_is_refused(tmp_path: Path, name: str, role: Any) -> None:
    state = PrivateState(tmp_path)
    state.identity("a", "trainer")
    with pytest.raises(ClientError, match="belongs to the trainer 'a'") as refusal:
        state.identity(name, role)
    assert refusal.value.exit is Exit.STATE


def test_a_folder_of_another_federation_is_refused(tmp_path: Path) -> None:
    state = PrivateState(tmp_path)
    identity = state.bind(state.identity("a", "trainer"), "fed-1")
    with pytest.raises(ClientError, match="belongs to federation fed-1, not to fed-2"):
        state.bind(identity, "fed-2")


def test_two_processes_cannot_use_one_folder(tmp_path: Path) -> None:
    first = PrivateState(tmp_path)
    with pytest.raises(ClientError, match="is in use by another client process") as refusal:
        PrivateState(tmp_path)
    assert refusal.value.exit is Exit.STATE
    first.close()
    PrivateState(tmp_path).close()


@pytest.mark.parametrize("name", ["identity.json", "committed.safetensors", "serving.json", "enrolment.json"])
@pytest.mark.parametrize("content", [b"", b"{", b'{"a": 1}'])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    state = PrivateState(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ClientError, match=f"{name} is damaged"):
        state.identity("a", "trainer"), state.committed(), state.serving(), state.enrolment()


def test_a_folder_of_another_version_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    state = PrivateState(tmp_path)
    state.identity("a", "trainer", secret="5" * 64)
    known = json.loads((tmp_path / "identity.json").read_bytes())
    older = {key: value for key, value in known.items() if key != "form"}  # as 0.3.0 wrote it
    for told, remedy in ((older, "go on with commit 7368013d"), (known | {"form": 2}, "go on with that version")):
        (tmp_path / "identity.json").write_text(json.dumps(told))
        with pytest.raises(ClientError, match=remedy) as refusal:
            state.identity("a", "trainer")
        assert refusal.value.exit is Exit.STATE
        assert json.loads((tmp_path / "identity.json").read_bytes()) == told


def test_a_damaged_update_is_never_sent(tmp_path: Path) -> None:
    state = PrivateState(tmp_path)
    state.write_pending(b"update", vector(1.0), ROUND_1)
    (tmp_path / "pending" / "update.safetensors").write_bytes(b"updatE")
    with pytest.raises(ClientError, match=r"pending/update.safetensors is damaged"):
        state.pending()


def told(pending: Pending | None) -> tuple[str, int, str, bytes]:
    """All that an update to be sent is."""
    assert pending is not None
    return pending.task_id, pending.round, pending.phase, pending.update.read()


def test_the_accepted_update_is_kept_until_the_next_one(tmp_path: Path) -> None:
    state = PrivateState(tmp_path)
    assert state.answered() is None
    for number, update in enumerate((b"first", b"second"), 1):
        state.write_pending(update, vector(1.0), TensorOrigin(f"task-{number}", number, "train"))
        state.commit()
        assert told(state.answered()) == (f"task-{number}", number, "train", update)
    state.write_pending(b"third", vector(1.0), ROUND_1)
    state.discard()
    assert told(state.answered()) == ("task-2", 2, "train", b"second"), "a refused one takes nobody's place"
    (tmp_path / "answered" / "update.safetensors").write_bytes(b"other")
    assert state.answered() is None, "what is damaged is not sent"
    state.delete_private()
    assert not (tmp_path / "answered").exists()


def test_private_tensors_and_the_update_made_with_them_are_forgotten_together(tmp_path: Path) -> None:
    state = PrivateState(tmp_path)
    state.reset_private()
    state.commit_prepared({"a": torch.ones(2)}, TensorOrigin(peers="p"))
    state.write_pending(b"update", {"a": torch.zeros(2)}, TensorOrigin("task-1", 1, "train"))
    state.reset_private()
    assert state.committed() == ({}, TensorOrigin())
    assert state.pending() is None


def test_private_tensors_may_share_memory(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    state = PrivateState(tmp_path)
    state.commit_prepared({"a": whole[:3], "b": whole[3:], "all": whole}, TensorOrigin(peers="p"))
    tensors, provenance = state.committed()
    assert tensors["b"].tolist() == [3.0, 4.0, 5.0]
    assert provenance == TensorOrigin(peers="p")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ClientError, match=r"state folder .*file/state cannot be used"):
        PrivateState(tmp_path / "file" / "state")


def test_a_folder_that_was_there_before_is_closed_to_others(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    PrivateState(folder).close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


Synced = list[tuple[str, str]]


def synced_by(monkeypatch: pytest.MonkeyPatch, folder: Path, change: Callable[[], None]) -> Synced:
    """What ``change`` does in order: files and folders that it syncs, and names that come in by renaming."""
    found: Synced = []
    sync, renamed, replaced = os.fsync, os.rename, os.replace

    def name(path: Any) -> str:
        return str(Path(path).relative_to(folder.parent))

    def fsync(handle: int) -> None:
        found.append(("sync", name(os.readlink(f"/proc/self/fd/{handle}"))))
        sync(handle)

    def rename(source: Any, target: Any) -> None:
        found.append(("rename", name(target)))
        renamed(source, target)

    def replace(source: Any, target: Any) -> None:
        found.append(("rename", name(target)))
        replaced(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        patch.setattr(os, "rename", rename)
        patch.setattr(os, "replace", replace)
        change()
    return found


def test_each_file_is_synced_before_rename_and_folder_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "s"
    state = PrivateState(folder)
    state._disk._sync = lambda handle: os.fsync(handle)  # looked up anew, so that it is seen
    assert synced_by(monkeypatch, folder, lambda: state.write_note("note", "text")) == [
        ("sync", "s/note.tmp"), ("rename", "s/note"), ("sync", "s"),
    ]  # fmt: skip
    files = ("update.safetensors", "private.safetensors", "about.json")
    assert synced_by(monkeypatch, folder, lambda: state.write_pending(b"update", vector(1.0), ROUND_1)) == [
        *(("sync", f"s/pending.tmp/{file}") for file in files),
        ("sync", "s/pending.tmp"), ("rename", "s/pending"), ("sync", "s"),
    ]  # fmt: skip
    assert synced_by(monkeypatch, folder, state.commit) == [
        ("rename", "s/committed.safetensors"), ("sync", "s"), ("rename", "s/answered"), ("sync", "s"),
    ]  # fmt: skip
    state.close()


def test_a_client_s_folder_is_synced_by_the_system_s_own_call(tmp_path: Path) -> None:
    state, passing = PrivateState(tmp_path / "s"), PrivateState(tmp_path / "t", ephemeral=True)
    assert state._disk._sync is os.fsync
    assert passing._disk._sync is not os.fsync
    state.close()
