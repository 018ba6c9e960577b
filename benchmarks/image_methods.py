"""All methods of the image side and whole image towers side by side, on symbols and on emoji; docs/results-image.md.

    python -m benchmarks.image_methods symbols --out results/image
    promptfed data emoji --out emoji && python -m benchmarks.image_methods emoji --out results/image

Rates are chosen on held-out training images of styles that no table has; then every method runs with each of three
styles left out, and with a style for each client, seed after seed. Finished federations are kept: the same command goes
on after an interruption, and `--seeds 0,1` makes the files of what is there. `--commands` prints the same as commands
of `promptfed bench`. What is asked of the pictures, pair by pair, stands in `QUESTIONS`, from before the first run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.harness import integers
from promptfed.cli.bench import Results, finish
from promptfed.cli.bench_output import run_shown
from promptfed.experiments.comparison import answers_of, compare
from promptfed.experiments.entries import Entry, parse_entry
from promptfed.experiments.known import KNOWN
from promptfed.experiments.runner import Bench, Runner
from promptfed.experiments.setting import Setting
from promptfed.experiments.sweep import Grid, Swept, sweep
from promptfed.shared.files import write_whole

SWEEP_SEED, SHARE = 10, 0.25
LEFT_OUT, PERSONAL = "leave-one-domain-out", "personalisation"
ROUNDS = 5
SPEC: dict[str, Any] = {
    "rounds": ROUNDS,
    "training": {"epochs": 1, "batch_size": 8, "schedule": "cosine"},
    "evaluation": {"every": ROUNDS},
}


@dataclass(frozen=True)
class Method:
    """A row: its name, its entry without a rate, and the rates that are tried (none: it trains nothing).

    ``like``: no rates of its own are tried, it takes that of another row, which trains the same numbers by the same
    loss or nearly so.
    """

    label: str
    entry: str
    rates: tuple[float, ...] = ()
    like: str = ""


@dataclass(frozen=True)
class Data:
    """A data set: three styles for the tables, two others for the rates, and what its backbone is.

    ``rates_of``: the data set on which the rates are chosen.
    """

    uri: str
    domains: tuple[str, ...]
    sweep: tuple[str, ...]
    rates_of: str
    shots: int
    spec: dict[str, Any]


DATA = {
    "symbols": Data(
        "symbols:{domain}?topic=signs&per_class=40&test_per_class=15",
        ("sketch", "chalk", "neon"),
        ("quickdraw", "blueprint"),
        "symbols",
        4,
        SPEC,
    ),
    "emoji": Data(
        "emoji:{domain}?folder=emoji",
        ("contrast", "notomono", "openmono"),
        ("openmoji", "fxemoji+emojione1"),
        "symbols",
        4,
        SPEC | {"backbone": {"model": "promptfed-emoji", "pretrained": "embedded"}},
    ),
}
TEXT, VISUAL = (0.01, 0.05, 0.2), (0.05, 0.2, 0.8)
TOWERS, HEADS = (1e-4, 3e-4, 1e-3), (3e-4, 1e-3, 3e-3)
OWN_HEAD = "head=linear:training.weight_decay=0.001"
METHODS = (
    Method("promptfl", "promptfl:m=8", TEXT),
    Method("fedapt", "fedapt:m=8", TEXT),
    Method("diprompt", "diprompt", TEXT),
    Method("fast_pt", "fast_pt:m=8", TEXT),
    Method("fedvpt", "fedvpt:m=8", VISUAL),
    Method("fedvpt_deep", "fedvpt_deep:m=8", VISUAL),
    Method("fedpr", "fedpr:m=8:training.optimizer=adam:training.weight_decay=0", (0.01, 0.03, 0.1)),
    Method("fedmvp", "fedmvp:label_space=federation", TEXT),
    Method("fedmaple", "fedmaple:m=8", (0.02, 0.1)),
    Method("plan", "plan:m=8", (0.005, 0.02)),
    Method("fedclip", "fedclip:training.weight_decay=0", (0.003, 0.01, 0.03)),
    Method("fedlora", "fedlora", (0.001, 0.003, 0.01)),
    Method("fedavg", "fedavg", TOWERS),
    Method("fedavg, last block", "fedavg:trainable=last_k", TOWERS),
    Method("fedavg, linear head", "fedavg:head=linear", HEADS),
    Method("fedprox", "fedprox", like="fedavg"),
    Method("fedprox, last block", "fedprox:trainable=last_k", like="fedavg, last block"),
    Method("tip_adapter", "tip_adapter:rounds=1"),
    Method("fedgda", "fedgda:rounds=1"),
    Method("fedmgp", "fedmgp", (0.01, 0.1)),
    Method("pfedmma", "pfedmma", TEXT),
    Method("singleset_vpt, own head", f"singleset_vpt:m=8:{OWN_HEAD}", like="fedvpt, own head"),
    Method("fedvpt, own head", f"fedvpt:m=8:{OWN_HEAD}", VISUAL),
    Method("pfedpg", "pfedpg:m=8:training.weight_decay=0.001", VISUAL),
    Method("singleset_full", "singleset_full", like="fedavg"),
    Method("fedrep", "fedrep", HEADS),
    Method("fedbabu", "fedbabu", HEADS),
    Method("fedrod", "fedrod", HEADS),
    Method("perfedavg", "perfedavg", (0.003, 0.01, 0.03)),
)
# (what is asked, the row that is said to be better, the other one), for each protocol.
QUESTIONS = {
    LEFT_OUT: (
        ("prompts against fine-tuning everything: FedVPT-Deep over FedAvg", "fedvpt_deep", "fedavg"),
        ("FedMaPLe over FedAvg", "fedmaple", "fedavg"),
        ("PromptFL over FedAvg", "promptfl", "fedavg"),
        ("PromptFL over FedAvg with a linear head (PLAN, FaST-PT)", "promptfl", "fedavg, linear head"),
        ("an adapter against fine-tuning everything: FedCLIP over FedAvg", "fedclip", "fedavg"),
        ("FedLoRA over FedAvg", "fedlora", "fedavg"),
        ("the last block over the whole tower (FedAvg)", "fedavg, last block", "fedavg"),
        ("the text head over a linear one (FedAvg)", "fedavg", "fedavg, linear head"),
        ("FedProx over FedAvg", "fedprox", "fedavg"),
        ("PLAN over FedMaPLe (PLAN)", "plan", "fedmaple"),
        ("FedMVP over FedMaPLe (FedMVP)", "fedmvp", "fedmaple"),
        ("FaST-PT over FedAPT (FaST-PT)", "fast_pt", "fedapt"),
        ("FedPR over FedVPT-Deep", "fedpr", "fedvpt_deep"),
        ("FedMaPLe over FedCLIP (PLAN)", "fedmaple", "fedclip"),
    ),
    PERSONAL: (
        ("prompts against fine-tuning everything: pFedPG over FedAvg (pFedPG)", "pfedpg", "fedavg, linear head"),
        ("FedVPT-Deep over FedAvg", "fedvpt_deep", "fedavg"),
        ("pFedPG over FedVPT with the same head (pFedPG)", "pfedpg", "fedvpt, own head"),
        ("pFedPG over FedRep (pFedPG)", "pfedpg", "fedrep"),
        ("pFedPG over FedRoD (pFedPG)", "pfedpg", "fedrod"),
        ("pFedPG over Tip-Adapter, which trains nothing", "pfedpg", "tip_adapter"),
        ("FedAvg over Tip-Adapter", "fedavg", "tip_adapter"),
        ("pFedMMA over PromptFL (pFedMMA)", "pfedmma", "promptfl"),
        ("FedMGP over PromptFL (FedMGP)", "fedmgp", "promptfl"),
        ("sharing the tower: FedAvg over each client's own", "fedavg", "singleset_full"),
        ("Per-FedAvg over FedAvg", "perfedavg", "fedavg"),
        ("FedBABU over FedRep (pFedPG)", "fedbabu", "fedrep"),
    ),
}  # fmt: skip


def setting(data: Data, domains: Sequence[str]) -> Setting:
    """A few images of each class and style."""
    return Setting((data.uri,), domains=tuple(domains), shots=data.shots)


def choose(name: str, methods: Sequence[Method], out: Path) -> tuple[list[Entry], list[Swept]]:
    """Every method's entry at the best of its rates, and how it was chosen, on held-out images of the other styles.

    ``out`` is the folder of all data sets: rates may have been chosen on another one (`Data.rates_of`).
    """
    rates_of = DATA[name].rates_of
    data, runner = DATA[rates_of], Runner(out / rates_of / "rates")
    wanted = {method.like for method in methods}
    tried = [each for each in METHODS if each.rates and (each in methods or each.label in wanted)]
    found: dict[str, Swept] = {}
    for rates in dict.fromkeys(each.rates for each in tried):
        entries = [parse_entry(each.entry, each.label) for each in tried if each.rates == rates]
        bench = Bench(KNOWN[PERSONAL], entries, setting(data, data.sweep), (0,), data.spec)
        _, rows = sweep(bench, Grid(rates, (SWEEP_SEED,), SHARE), lambda trial: run_shown(trial, runner))
        found |= {row.label: row for row in rows}
    chosen = []
    for each in methods:
        row = found.get(each.like or each.label)
        rate = "" if row is None else f":training.learning_rate={row.chosen}"
        chosen.append(parse_entry(each.entry + rate, each.label))
    return chosen, [found[each.label] for each in tried]


def run(name: str, methods: Sequence[Method], seeds: Sequence[int], folder: Path) -> None:
    """Choose the rates, run both protocols seed after seed, and write what the page is made of.

    ``folder`` is that of all data sets.

    Raises:
        CommandError: a federation that cannot be run; what was finished before stays.
    """
    data, out = DATA[name], folder / name
    entries, swept = choose(name, methods, folder)
    benches = {
        protocol: Bench(KNOWN[protocol], entries, setting(data, data.domains), seeds, data.spec)
        for protocol in (LEFT_OUT, PERSONAL)
    }
    for seed in seeds:
        for protocol, bench in benches.items():
            run_shown(replace(bench, seeds=(seed,)), Runner(out / protocol))
    for protocol, bench in benches.items():
        finish(bench, Runner(out / protocol))
    gather(name, entries, swept, out)


def gather(name: str, entries: Sequence[Entry], swept: Sequence[Swept], out: Path) -> None:
    """``summary.json``: both tables, the rates and the answers to the questions, without single runs."""
    record: dict[str, Any] = {"data": name, "spec": DATA[name].spec, "rates": [row.model_dump() for row in swept]}
    record |= {"rates_of": DATA[name].rates_of, "chosen": {entry.label: written(entry) for entry in entries}}
    for protocol in (LEFT_OUT, PERSONAL):
        results = Results.model_validate_json((out / protocol / "results.json").read_bytes())
        kept = results.model_dump(
            mode="json", include={"setting", "methods", "seeds", "table", "provenance", "measures"}
        )
        for row in kept["measures"]:
            del row["reliability"]
        specs = {run.label: run.spec["training"] for run in results.runs}
        seconds = round(sum(run.wall_seconds + run.setup_seconds for run in results.runs))
        kept |= {"training": specs, "seconds": seconds, "questions": answers(protocol, results)}
        record[protocol] = kept
    write_whole(
        out / "summary.json", (json.dumps(record, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()
    )


def answers(protocol: str, results: Results) -> list[dict[str, Any]]:
    """Each question whose two rows are there, with the paired tests over its pictures (`comparison`)."""
    found = []
    kind = "unseen" if protocol == LEFT_OUT else "test"
    for question, a, b in QUESTIONS[protocol]:
        if {a, b} <= set(results.methods):
            [pair] = [
                one for one in compare(answers_of(results.runs, a), answers_of(results.runs, b)) if one.test_set == kind
            ]
            found.append({"question": question} | pair.model_dump(mode="json"))
    return found


def commands(name: str, methods: Sequence[Method], entries: Sequence[Entry], seeds: Sequence[int]) -> str:
    """What makes the same with `promptfed bench`: the spec's file, a command for the rates, one for each protocol.

    ``entries`` are those of ``methods`` at the rates that were chosen.
    """
    data = DATA[name]
    tried = [f"{each.entry}:training.learning_rate={rate}" for each in methods for rate in each.rates]
    chosen = [written(entry) for entry in entries]
    held_out = f"--validation {SHARE} --seeds {SWEEP_SEED}"
    tested = f"--seeds {','.join(map(str, seeds))}"
    benches = [
        (LEFT_OUT, data.domains, tested, LEFT_OUT, chosen),
        (PERSONAL, data.domains, tested, PERSONAL, chosen),
    ]
    if data.rates_of == name:
        benches.insert(0, (PERSONAL, data.sweep, held_out, "rates", tried))
    lines = [f"# image-{name}.yaml: {yaml.safe_dump(data.spec, default_flow_style=True, width=1000).strip()}"]
    for protocol, domains, options, folder, texts in benches:
        where = f"--data '{data.uri}' --domains {','.join(domains)} --shots {data.shots}"
        lines += [
            f"promptfed bench {protocol} {where} \\",
            f"  --spec image-{name}.yaml {options} --out results/image/{name}/{folder} \\",
            f"  --methods '{','.join(texts)}'",
        ]
    return "\n".join(lines)


def written(entry: Entry) -> str:
    """An entry as ``--methods`` takes it."""
    options = [f"{key}={json.dumps(value).strip(chr(34))}" for key, value in entry.method.items() if key != "name"]
    changes = [f"{key}={value}" for key, value in _flat(entry.changes)]
    return ":".join([str(entry.method["name"]), *options, *changes])


def _flat(section: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found = []
    for key, value in section.items():
        found += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of the data sets, or print its commands."""
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("data", choices=sorted(DATA))
    command.add_argument("--out", type=Path, required=True, help="a folder for each data set comes into it")
    command.add_argument("--seeds", type=integers, default=(0, 1, 2))
    command.add_argument("--methods", help="rows by their names, separated by semicolons; default: all")
    command.add_argument("--commands", action="store_true", help="print the commands, with the rates that were chosen")
    options = command.parse_args(arguments)
    wanted = options.methods.split(";") if options.methods else [each.label for each in METHODS]
    methods = [each for each in METHODS if each.label in wanted]
    if len(methods) < len(wanted):
        command.error(f"--methods: there are {'; '.join(each.label for each in METHODS)}")
    if options.commands:
        entries, _ = choose(options.data, methods, options.out)
        print(commands(options.data, methods, entries, options.seeds))
    else:
        run(options.data, methods, options.seeds, options.out)


if __name__ == "__main__":
    main()
