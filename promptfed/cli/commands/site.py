"""A data owner's commands: `promptfed doctor`, `privacy`, `ledger`, `policy`, `site-log`.

`promptfed coordinator`, `promptfed client` and `join`: the two services, whose options are their settings.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Set
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from promptfed.cli.app import Made, app
from promptfed.cli.common import Json, Written, options_of, refuse, use_backbone_file
from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.joining.invited import GIVEN, accept
from promptfed.client_service.privacy.ledger import Ledger
from promptfed.client_service.settings import Settings as ClientSettings
from promptfed.client_service.settings import ledger_path, make_settings
from promptfed.client_service.state import site_log
from promptfed.console.output import console, print_json, read_federation, say, table, tell
from promptfed.coordinator.settings import Settings as CoordinatorSettings
from promptfed.sdk.client import PROXY_VARIABLE
from promptfed.shared.errors import BadInput, Refused
from promptfed.shared.methods.core.default_backbone import default_backbone
from promptfed.shared.plain_text import counted, plain
from promptfed.shared.service.streams import leave
from promptfed.shared.spec.spec import BackboneSpec

if TYPE_CHECKING:
    from promptfed.shared.api.api_schemas import SpendList

ledger_group = app.group("ledger", "Read the privacy budget of this owner's data.", "Take part with own data")
ANSWER_SECONDS = 30.0
EXPLAINED = (
    "ε bounds how much more likely one record of the training images made any result: by at most e^ε, except with "
    "probability δ. This ε compares the record with one that contributes nothing; compared with another record "
    "instead (replace-one), it is {:.4g}. What several federations have spent adds up to less than the sum of their ε."
)
privacy_group = app.group("privacy", "Plan what differentially private training costs.", "Take part with own data")
policy_group = app.group("policy", "Write and check a site's policy.", "Take part with own data")
site_log_group = app.group("site-log", "Read and verify a client's own log.", "Take part with own data")
StateDir = Annotated[Path, typer.Argument(help="the client's --state-dir")]
COLOURS = {"pass": "green", "warn": "yellow", "fail": "red"}

CHECKED = {
    *("coordinator", "federation", "enrolment_token_file", "data", "domain", "role", "device", "state_dir"),
    *("allow_backbone", "backbone_file", "policy", "ca_file", "proxy", "allow_plain_http"),
}
"""Settings of `promptfed client` that can be checked."""

UNCHECKED = ClientSettings.model_fields.keys() - CHECKED


@app.add(section="Operate federations")
def coordinator(given: Annotated[dict[str, Any], Made(options_of(CoordinatorSettings))]) -> None:
    """Run a coordinator."""
    from promptfed.coordinator.__main__ import start

    leave(start(given))


@app.add(section="Take part with own data")
def client(given: Annotated[dict[str, Any], Made(options_of(ClientSettings))]) -> None:
    """Run a client, which takes part in a federation with this owner's data."""
    from promptfed.client_service.__main__ import start

    leave(start(make_settings(**given)))


@app.add(section="Take part with own data")
def join(
    invitation: Annotated[
        str, typer.Argument(help="-: asks for the text that the operator sent, which ps would show; or a file with it")
    ],
    given: Annotated[dict[str, Any], Made(options_of(ClientSettings, without=GIVEN))],
) -> None:
    """Accept an operator's invitation: run a client, which takes part in a federation with this owner's data."""
    from promptfed.client_service.__main__ import start

    leave(start(accept(_text_of(invitation), given)))


def _text_of(invitation: str) -> str:
    """The invitation: from standard input, a file, or as it is."""
    if invitation == "-":
        if sys.stdin.isatty():
            sys.stderr.write("Paste the invitation: ")
            sys.stderr.flush()
        return sys.stdin.readline()
    with suppress(OSError, UnicodeDecodeError):  # no file: too long for a name, for one
        return Path(invitation).read_text()
    return invitation


def open_ledger(
    ledger: Annotated[Path | None, typer.Option(help="its file; default: the data set's own")] = None,
    dataset: Annotated[str | None, typer.Option(help="name of the data set; default: default")] = None,
) -> Ledger:
    """The ledger of a data set. Raises PromptfedError if both are given."""
    if ledger is not None and dataset is not None:
        raise BadInput("--ledger and --dataset both name the ledger: give one")
    name = "default" if dataset is None else dataset
    return Ledger(ledger_path(name) if ledger is None else ledger, name)


def expect_there(ledger: Ledger) -> None:
    """Raise PromptfedError if the ledger has no file."""
    if ledger.path is None or not ledger.path.exists():
        text = f"there is no ledger {ledger.path}: nothing was spent there"
        raise BadInput(f"{text}, or its data set has another --dataset or --ledger")


OwnLedger = Annotated[Ledger, Made(open_ledger)]


@ledger_group.add()
def show(
    ledger: OwnLedger,
    most: Annotated[float, typer.Option("--max-epsilon", help="the budget")] = 8.0,
    as_json: Json = False,
) -> None:
    """Show what was spent, by federation and in all, and what is left."""
    expect_there(ledger)
    spends = ledger.spends()
    federations = sorted({(spend.coordinator, spend.federation_id) for spend in spends})
    shares = [_of_federation(ledger, spends, *federation) for federation in federations]
    epsilon, replace_one = ledger.epsilon(), ledger.epsilon(replace_one=True)
    if as_json:
        facts = {"ledger": str(ledger.path), "delta": ledger.delta(), "epsilon": epsilon}
        facts |= {"left": max(0.0, most - epsilon), "epsilon_replace_one": replace_one}
        print_json(facts | {"test_epsilon": ledger.epsilon("test"), "federations": shares})
        return
    say(f"{ledger.path}: ε = {epsilon:.4g} of {most:g} spent at δ = {ledger.delta()}")
    console.print(EXPLAINED.format(replace_one), highlight=False)
    if shares:
        columns = ["name", "federation", "coordinator", "first", "last", "releases"]
        rows = [[*(str(share[key]) for key in columns), f"{share['epsilon']:.4g}"] for share in shares]
        console.print(table(None, [*columns, "ε by itself"], rows))


def _of_federation(ledger: Ledger, spends: list[Any], coordinator: str, federation: str) -> dict[str, object]:
    from promptfed.shared.privacy.accounting import epsilon_of

    own = [spend for spend in spends if (spend.coordinator, spend.federation_id) == (coordinator, federation)]
    events = [event for spend in own if spend.split == "train" for event in spend.events]
    return {
        "name": own[-1].federation or "-",
        "federation": federation,
        "coordinator": coordinator,
        "first": own[0].at[:10],
        "last": own[-1].at[:10],
        "releases": len(own),
        "epsilon": epsilon_of(events, ledger.delta() or 0.0),
    }


@ledger_group.add()
def verify(ledger: OwnLedger) -> None:
    """Check that every line follows from the previous one and states the ε that its events add up to."""
    expect_there(ledger)
    spends = ledger.spends()
    if spends and abs(ledger.epsilon(spends[-1].split) - spends[-1].epsilon) > 1e-6:
        own = ledger.epsilon(spends[-1].split)
        text = f"the last line says ε = {spends[-1].epsilon:.6g}, its events make {own:.6g}"
        raise ClientError(Exit.LEDGER, f"{ledger.path}: {text}")
    say(f"{ledger.path} holds together: {counted(len(spends), 'release')}.")


@ledger_group.add()
def adopt(
    state_dir: Annotated[Path, typer.Option(help="the client's state folder, whose coordinator is asked")],
    ledger: OwnLedger,
    coordinator: Annotated[str | None, typer.Option(help="its address now; default: as it was joined")] = None,
    ca_file: Annotated[Path | None, typer.Option(help="PEM file of the authority that signed it")] = None,
    as_json: Json = False,
) -> None:
    """Add the releases that a coordinator knows of a client and that an old copy of the ledger lacks."""
    from promptfed.client_service.privacy.ledger import adopt_head
    from promptfed.client_service.state.private_state import PrivateState

    spends, address = known_spends(state_dir, coordinator, ca_file)
    state = PrivateState(state_dir)  # first: it locks the folder, so that nobody else uses it meanwhile
    try:
        added = ledger.adopt(spends, address)
        adopt_head(ledger, state)
    finally:
        state.close()
    result = f"{counted(added, 'release')} added" if added else "it lacks nothing"
    epsilon = ledger.epsilon()
    facts = {"ledger": str(ledger.path), "added": added, "epsilon": epsilon}
    tell(as_json, facts, f"{ledger.path}: {result}; ε = {epsilon:.4g} spent.")


def known_spends(folder: Path, coordinator: str | None, ca_file: Path | None) -> tuple[SpendList, str]:
    """The spends that the coordinator of a client's state folder knows, and its address. The client may be running.

    Raises:
        PromptfedError: the folder is no enrolled client's, or the coordinator does not answer it.
    """
    from promptfed.client_service.http.bodies import SentLog
    from promptfed.client_service.http.connection import BadAnswer, Refused
    from promptfed.client_service.http.coordinator_client import CoordinatorClient, http_to
    from promptfed.client_service.privacy.agreement import FILE
    from promptfed.client_service.state.site_log import SiteLog
    from promptfed.shared.api.api_schemas import SpendList
    from promptfed.shared.service.addresses import addresses_of

    try:
        identity = json.loads((folder / "identity.json").read_bytes())
        address = coordinator or json.loads((folder / FILE).read_bytes())["terms"]["coordinator"]
        federation, secret = str(identity["federation_id"]), str(identity["secret"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        text = f"{folder} holds no client that has enrolled: give its --state-dir"
        raise BadInput(text) from None

    async def ask() -> SpendList:
        async with http_to(address, ca_file, proxy=os.environ.get(PROXY_VARIABLE)) as http:
            client = CoordinatorClient(http, address, federation, ANSWER_SECONDS, secret)
            client.sent = SentLog(SiteLog(folder).note)
            return await client.ask(SpendList, "spends")

    try:
        return asyncio.run(ask()), addresses_of(address)[0]
    except Refused as refused:
        raise ClientError(Exit.REFUSED, f"{address} does not tell: {refused}") from None
    except BadAnswer as error:
        raise ClientError(Exit.PROTOCOL, str(error)) from None


@privacy_group.add()
def plan(
    spec: Annotated[Path, typer.Argument(help="the federation's spec or a run file, as YAML or JSON")],
    ledger: OwnLedger,
    written: Written,
    samples: Annotated[str, typer.Option(help="numbers of training images of clients, by commas")] = "",
    clients: Annotated[int, typer.Option(min=1, help="of level client: trainers that will enrol")] = 1,
    as_json: Json = False,
) -> None:
    """Compute what a protected federation will cost clients of these sizes, without asking a coordinator.

    At level sample, "with earlier" is the ε of the data set's whole ledger with this federation added, at the ledger's
    δ.
    """
    try:
        plans = _plans(spec, samples, clients, ledger, written)
    except ValueError as error:  # of the privacy accounting too
        raise BadInput(str(error)) from None
    if as_json:
        print_json({"clients": plans})
        return
    columns = list(plans[0])
    console.print(table(None, columns, [[f"{planned[key]:g}" for key in columns] for planned in plans]))


def _plans(path: Path, samples: str, clients: int, ledger: Any, written: Set[str]) -> list[dict[str, float]]:
    from promptfed.shared.methods import method_for, resolve_spec
    from promptfed.shared.methods.core.costs import training_loops

    spec = resolve_spec(read_federation(path))
    if spec.privacy.protects_clients:
        refuse(written & {"samples", "ledger", "dataset"}, "of level sample, and the spec has level client")
        return [_planned_for_clients(spec, clients)]
    if spec.privacy.level != "sample":
        raise ValueError("the spec is not protected: give privacy: {level: sample, ...}")
    refuse(written & {"clients"}, "of level client, and the spec has level sample")
    if written & {"ledger", "dataset"}:
        expect_there(ledger)
    if not samples:
        raise ValueError("give --samples, such as --samples 800,1200: the cost to a client depends on them")
    loops = training_loops(method_for(spec), spec.rounds)
    return [_planned(spec, loops, int(count), ledger) for count in samples.split(",")]


def _planned_for_clients(spec: Any, clients: int) -> dict[str, float]:
    from promptfed.shared.methods import method_for
    from promptfed.shared.methods.core.costs import allowed_rounds, costs, expected_clients, noised_phases

    method = method_for(spec)
    rounds = allowed_rounds(method, spec) or spec.rounds
    number = max(clients, spec.participation.min_clients)
    in_all = costs(spec, noised_phases(method, rounds, spec.rounds))
    secret = in_all["epsilon_if_secret"]
    return {
        "clients": number,
        "expected": expected_clients(spec, number),
        "delta": spec.privacy.delta,
        "rounds": rounds,
        "noise": spec.privacy.noise_multiplier,
        "epsilon of a round": round(costs(spec, noised_phases(method, 1, spec.rounds))["epsilon"] or 0.0, 4),
        "epsilon": round(in_all["epsilon"] or 0.0, 4),
        "replace-one": round(in_all["epsilon_replace_one"] or 0.0, 4),
        **({} if secret is None else {"if secret": round(secret, 4)}),
    }


def _planned(spec: Any, loops: int, units: int, ledger: Any) -> dict[str, float]:
    from promptfed.shared.privacy.accounting import (
        Event,
        calibrate,
        check_delta,
        default_delta,
        epsilon_of,
        replace_one_epsilon,
        training_event,
    )

    privacy, training = spec.privacy, spec.training
    delta = ledger.delta() or privacy.delta or default_delta(units)
    check_delta(delta, units)
    shape = training_event(units, training.batch_size, training.epochs, 1.0, loops)
    z = privacy.noise_multiplier or calibrate(privacy.epsilon, delta, shape.q, shape.count)
    one_round, all_rounds = (
        Event("gaussian", shape.q, z, shape.count // loops),
        Event("gaussian", shape.q, z, shape.count),
    )
    earlier = [event for spend in ledger.spends() if spend.split == "train" for event in spend.events]
    return {
        "samples": units,
        "delta": delta,
        "sampling": shape.q,
        "steps": shape.count,
        "noise": z,
        "epsilon of a round": round(epsilon_of([one_round], delta), 4),
        "epsilon": round(epsilon_of([all_rounds], delta), 4),
        "replace-one": round(replace_one_epsilon([all_rounds], delta), 4),
        "with earlier": round(epsilon_of([*earlier, all_rounds], delta), 4),
    }


@policy_group.add()
def example() -> None:
    """Print a policy with comments, to begin with."""
    from promptfed.client_service.privacy.policy import EXAMPLE

    typer.echo(EXAMPLE, nl=False)


@policy_group.add()
def check(policy: Annotated[Path, typer.Argument(help="a policy file")], as_json: Json = False) -> None:
    """Check that a policy can be read, and show what it says.

    `promptfed doctor --policy` compares it with a federation.
    """
    from promptfed.client_service.privacy.policy import read_policy

    rules, digest = read_policy(policy)
    if as_json:
        print_json({"sha256": digest, "policy": rules.model_dump(mode="json")})
        return
    say(f"{policy} is understood (sha256 {digest}).")
    for section, values in rules.model_dump(mode="json", exclude_none=True).items():
        say(f"  {section}: {values}")


def _expect_log(folder: Path) -> None:
    """Raise PromptfedError if a folder has neither a log nor the head of one."""
    if not any((folder / name).exists() for name in (site_log.FILE, site_log.HEAD)):
        text = f"{folder} holds no {site_log.FILE}: name the --state-dir of a client that has joined"
        raise BadInput(text)


@site_log_group.add("show")
def show_log(state_dir: StateDir = Path(), as_json: Json = False) -> None:
    """Print the log, one line for each entry."""
    _expect_log(state_dir)
    try:
        lines = site_log.read(state_dir)
    except site_log.ChangedLog as changed:
        raise Refused(f"the site log was changed: {changed}") from None
    for line in lines:
        if as_json:
            typer.echo(json.dumps(line))
            continue
        facts = [f"{key}={value}" for key, value in line.items() if key not in ("n", "at", "what", "chain", "text")]
        say(" ".join([str(line["at"])[:19], str(line["what"]), *map(plain, facts)]))


@site_log_group.add("verify")
def verify_log(
    state_dir: StateDir = Path(),
    head: Annotated[str | None, typer.Option(help="a head that an earlier verify has printed")] = None,
    as_json: Json = False,
) -> None:
    """Compute the log's chain of hashes again; the exit code is 6 if the log was changed."""
    _expect_log(state_dir)
    try:
        last = site_log.verify(state_dir, head)
    except site_log.ChangedLog as changed:
        raise Refused(f"the site log was changed: {changed}") from None
    text = f"{counted(last.n, 'line')}, each as it was written; head {last.chain}"
    tell(as_json, {"lines": last.n, "head": last.chain}, text)


@app.add(section="Take part with own data")
def doctor(
    given: Annotated[dict[str, Any], Made(options_of(ClientSettings, UNCHECKED, required=False))],
    written: Written,
    model: Annotated[
        str | None, typer.Option(help="backbone to load where no coordinator names it; default: what suits the data")
    ] = None,
    pretrained: Annotated[
        str | None, typer.Option(help="its weights; default: embedded, or those that the model brings")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check data, GPU, backbone and coordinator, and show what would leave this machine, without joining."""
    from promptfed.client_service.joining.doctor import Examination

    if "coordinator" in given:
        refuse(written & {"model", "pretrained"}, "the coordinator names the backbone; leave it out")
    use_backbone_file(given.get("backbone_file"))
    model = model or default_backbone(None, [given["data"]] if given.get("data") else [])[0]
    own = None if ":" in model else BackboneSpec().pretrained  # hf-hub:, local-dir:
    examination = Examination.of(BackboneSpec(model=model, pretrained=pretrained or own), **given)
    examination.run()
    if as_json:
        disclosure = examination.disclosure.facts() if examination.disclosure is not None else None
        print_json({"checks": [asdict(check) for check in examination.checks], "leaves": disclosure})
    else:
        _show(examination)
    failed = [check.name for check in examination.checks if check.verdict == "fail"]
    if failed:
        raise BadInput(f"not ready: {', '.join(failed)}")


def _show(examination: Any) -> None:
    for check in examination.checks:
        console.print(check.line(), style=COLOURS[check.verdict], highlight=False, markup=False, soft_wrap=True)
    if examination.disclosure is not None:
        for line in ("", *examination.disclosure.lines()):
            say(line)
