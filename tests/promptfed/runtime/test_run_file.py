"""Run files: what they hold, how many clients they make, and what is wrong with a bad one."""

from __future__ import annotations

from pathlib import Path

import pytest

from promptfed.runtime.processes import Site, client_options
from promptfed.runtime.run_file import RunFile, read_run
from promptfed.sdk.client import CommandError

HEAD = "name: run\nmethod: {name: promptfl}\nrounds: 2\n"


def run(tmp_path: Path, text: str, clients: int | None = None) -> RunFile:
    path = tmp_path / "spec.yaml"
    path.write_text(HEAD + text)
    return read_run(path, clients)


LISTED = """
clients:
  - {name: a, data: "symbols:sketch"}
  - {name: b, data: "symbols:neon", tests: {target: "symbols:photo"}}
  - {name: referee, data: "symbols:photo", role: evaluator}
"""
COUNTED = """
clients:
  - {name: "site-{index}", count: 3, data: "digits?partition=iid&clients={count}&client={index}"}
  - {name: referee, data: "digits", role: evaluator, tests: {novel: "digits?classes=novel"}}
"""


def test_listed_clients_keep_their_order(tmp_path: Path) -> None:
    found = run(tmp_path, LISTED)
    assert found.spec == {"name": "run", "method": {"name": "promptfl"}, "rounds": 2}
    assert found.sites == (
        Site("a", "symbols:sketch"),
        Site("b", "symbols:neon", tests={"target": "symbols:photo"}),
        Site("referee", "symbols:photo", "evaluator"),
    )


def test_a_counted_entry_numbers_its_clients(tmp_path: Path) -> None:
    names = [site.name for site in run(tmp_path, COUNTED).sites]
    assert names == ["site-0", "site-1", "site-2", "referee"]
    five = run(tmp_path, COUNTED, clients=5).sites
    assert [site.name for site in five] == [*(f"site-{k}" for k in range(5)), "referee"]
    assert five[4].data == "digits?partition=iid&clients=5&client=4"


def test_fewer_listed_trainers_leave_the_evaluators(tmp_path: Path) -> None:
    assert [site.name for site in run(tmp_path, LISTED, clients=1).sites] == ["a", "referee"]


def test_the_file_names_the_federation_where_the_spec_does_not(tmp_path: Path) -> None:
    path = tmp_path / "eyes.yaml"
    path.write_text("method: {name: promptfl}\nclients: {count: 2, data: digits}\n")
    found = read_run(path)
    assert found.spec["name"] == "eyes"
    assert [site.name for site in found.sites] == ["client-0", "client-1"]


@pytest.mark.parametrize(
    ("text", "clients", "complaint"),
    [
        ("", None, "has no `clients`"),
        ("clients: []", None, "`clients` is empty"),
        ("clients: [{name: a}]", None, r"clients\.0\.data: is missing"),
        ("clients: [{data: digits, colour: red}]", None, r"clients\.0\.colour: unknown key"),
        ("clients: {data: digits, count: 0}", None, r"clients\.count: must be greater"),
        ("clients: [{data: digits, role: boss}]", None, r"clients\.0\.role"),
        ("clients: {data: digits, name: a, count: 2}", None, "two clients are named a"),
        ("clients: [{data: digits, name: a b}]", None, "'a b' is no client name"),
        ("clients: [{data: digits, role: evaluator}]", None, "no client is a trainer"),
        ("clients: [{data: digits, tests: {'a@b': digits}}]", None, r"clients\.0\.tests"),
        (LISTED, 3, "lists 2 trainers, not 3"),
    ],
)
def test_a_bad_run_file_is_refused_in_one_line(tmp_path: Path, text: str, clients: int | None, complaint: str) -> None:
    with pytest.raises(CommandError, match=complaint) as refused:
        run(tmp_path, text, clients)
    assert "\n" not in str(refused.value)


def test_clients_have_words_for_their_domains_which_reach_their_command_line(tmp_path: Path) -> None:
    listed = """
clients:
  - {name: "site-{index}", count: 2, data: "digits", domain: "pen number {index} of a {}"}
  - {name: referee, data: "digits", role: evaluator}
"""
    sites = run(tmp_path, listed).sites
    assert [site.domain for site in sites] == ["pen number 0 of a {}", "pen number 1 of a {}", None]
    assert "--domain=pen number 1 of a {}" in client_options(sites[1], ())
    assert not [option for option in client_options(sites[2], ()) if option.startswith("--domain")]
