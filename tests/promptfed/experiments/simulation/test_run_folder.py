"""The folder of a run: whose it is, and that its clients have secrets of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from promptfed.cli.app import exit_code
from promptfed.experiments.cluster.crew import shares
from promptfed.experiments.simulation.run_folder import RunFolder, identity, run_folder
from promptfed.runtime.processes import Site
from promptfed.shared.errors import BadInput, PromptfedError
from promptfed.shared.methods import resolve_spec
from promptfed.shared.service.reasons import Exit

SITES = tuple(Site(f"site-{number}", f"symbols:neon?seed={number}") for number in range(5))


def run(rounds: int = 2) -> str:
    return identity(resolve_spec({"name": "small", "method": {"name": "promptfl"}, "rounds": rounds}), SITES)


def test_a_folder_belongs_to_one_run_and_keeps_its_key(tmp_path: Path) -> None:
    place = tmp_path / "new" / "storage"
    with run_folder(place, run()) as first:
        assert first.path == place
        assert len(bytes.fromhex(first.key)) == 32
    assert (place / "run.key").stat().st_mode & 0o777 == 0o600
    with run_folder(place, run()) as second:
        assert second.key == first.key
    with pytest.raises(PromptfedError, match=r"another run .*give a new folder") as refused, run_folder(place, run(3)):
        pass
    assert exit_code(refused.value) == Exit.BAD_INPUT


def test_two_commands_do_not_use_one_folder_at_once(tmp_path: Path) -> None:
    with (
        run_folder(tmp_path / "storage", run()),
        pytest.raises(PromptfedError, match="another command runs with --storage"),
        run_folder(tmp_path / "storage", run()),
    ):
        pass
    with run_folder(tmp_path / "storage", run()):
        pass


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "holiday.jpg").touch()
    with pytest.raises(PromptfedError, match="is not empty, and holds no run"), run_folder(tmp_path, run()):
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["holiday.jpg"]
    (tmp_path / "holiday.jpg").unlink()
    (tmp_path / "run.json").write_text("[")
    with pytest.raises(PromptfedError, match=r"run\.json cannot be read"), run_folder(tmp_path, run()):
        pass
    with pytest.raises(PromptfedError, match="cannot use --storage"), run_folder(tmp_path / "run.json", run()):
        pass


def test_an_interrupted_beginning_is_gone_on_with(tmp_path: Path) -> None:
    """Killed between the two files of a new folder."""
    with run_folder(tmp_path, run()) as first:
        (tmp_path / "run.json").unlink()
    with run_folder(tmp_path, run()) as second:
        assert len(bytes.fromhex(second.key)) == 32
    assert first.path == second.path


def test_without_storage_nothing_stays() -> None:
    with run_folder(None, run()) as made:
        assert made.path.is_dir()
        assert not made.lasting
    assert not made.path.exists()


def test_another_spec_or_other_clients_make_another_run() -> None:
    assert run() == run()
    assert run() != run(3)
    spec = resolve_spec({"name": "small", "method": {"name": "promptfl"}, "rounds": 2})
    assert identity(spec, SITES) != identity(spec, SITES[:4])


def test_secrets_are_the_same_again_and_differ_by_client_and_run() -> None:
    keys = ["00" * 32, "01" * 32]
    secrets = {RunFolder(Path(), key, True).secret(site.name) for key in keys for site in SITES}
    assert len(secrets) == len(keys) * len(SITES)
    assert all(len(bytes.fromhex(secret)) == 32 for secret in secrets)


@pytest.mark.parametrize("crews", [1, 2, 3, 5])
def test_every_client_is_in_one_crew(crews: int) -> None:
    dealt = shares(SITES, crews)
    assert sorted(site.name for share in dealt for site in share) == [site.name for site in SITES]
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


@pytest.mark.parametrize("stored", [False, True])
def test_a_refused_command_leaves_a_new_folder_only_to_what_it_has_stored(tmp_path: Path, stored: bool) -> None:
    place = tmp_path / "storage"
    with pytest.raises(PromptfedError, match="no room"), run_folder(place, run()):
        if stored:
            (place / "data").mkdir()
        raise BadInput("no room")
    if stored:
        with pytest.raises(PromptfedError, match="another run"), run_folder(place, run(3)):
            pass
    with run_folder(place, run() if stored else run(3)) as folder:
        assert folder.lasting
