"""`promptfed privacy`: what differentially private training costs."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Annotated, Any

import typer

from promptfed.cli.app import app
from promptfed.cli.commands.ledger import OwnLedger, expect_there
from promptfed.cli.common import Json, Written, refuse
from promptfed.console.files import read_federation
from promptfed.console.output import console, print_json, table
from promptfed.shared.errors import BadInput

privacy_group = app.group("privacy", "Plan what differentially private training costs.", "Take part with own data")


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
