"""All methods of the image side and whole image towers side by side, on symbols and on emoji; docs/results/image.md.

    python -m benchmarks.image_methods symbols --out results/image
    python -m benchmarks.image_methods names --out results/image
    promptfed data emoji --out emoji && python -m benchmarks.image_methods emoji --out results/image

Rates are chosen on held-out training images of styles that no table has; then every method runs with a style left out,
another one for each seed (`--every-target`: each style for each seed), and with a style for each client. Finished
federations are kept: the same command goes on after an interruption, and `--gather` makes the summary of those that
are there. `--into` a former summary renews its rows of `--methods`; those of `--beside` run again at its rates, so that
questions can be answered. `--commands` prints the same as commands of `promptfed bench`. What is asked of the pictures,
pair by pair, stands in `QUESTIONS`, from before the first run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from benchmarks.harness import integers
from benchmarks.image_summary import renewed
from promptfed.cli.bench_output import run_shown
from promptfed.experiments.bench.entries import BenchEntry, parse_entry
from promptfed.experiments.bench.results import BenchRun
from promptfed.experiments.bench.runner import Bench, Runner
from promptfed.experiments.bench.sweep import Grid, Swept, sweep
from promptfed.experiments.bench.tables import rows_of
from promptfed.experiments.figures.bench_metrics import measures_of
from promptfed.experiments.figures.comparison import answers_of, compare
from promptfed.experiments.protocols.derived import KNOWN
from promptfed.experiments.protocols.setting import Setting
from promptfed.shared.files import write_whole

SWEEP_SEED, SHARE = 10, 0.25
LEFT_OUT, PERSONAL = "leave-one-domain-out", "personalisation"
Planned = Mapping[str, Sequence[Bench]]  # a bench for each seed, by protocol
ROUNDS = 5
SPEC: dict[str, Any] = {
    "rounds": ROUNDS,
    "training": {"epochs": 1, "batch_size": 8, "schedule": "cosine"},
    "evaluation": {"every": ROUNDS},
}
EMOJI = {"backbone": {"model": "promptfed-emoji", "pretrained": "embedded"}}


@dataclass(frozen=True)
class Method:
    """A row: its name, its entry without a rate, and the rates that are tried (none: it trains nothing).

    ``head_rates``: those of a new linear head, each of which is tried with each rate of what else is trained.
    ``like``: no rates of its own are tried, it takes that of another row, which trains the same numbers by the same
    loss or nearly so.
    """

    label: str
    entry: str
    rates: tuple[float, ...] = ()
    like: str = ""
    head_rates: tuple[float, ...] = ()

    def tried(self) -> dict[str, str]:
        """Entries without a rate by label: one for each rate of the head, or the method's own."""
        if not self.head_rates:
            return {self.label: self.entry}
        return {f"{self.label}, head {rate:g}": f"{self.entry}:head_learning_rate={rate}" for rate in self.head_rates}


@dataclass(frozen=True)
class Data:
    """A data set: the styles of the tables, two others for the rates, and what its backbone is.

    ``rates_of``: the data set on which the rates are chosen. ``targets``: each of these is left out for each seed;
    default: another one for each seed. ``protocols``: those that it can be used for.
    """

    uri: str
    domains: tuple[str, ...]
    sweep: tuple[str, ...]
    rates_of: str
    shots: int | None
    spec: dict[str, Any]
    targets: tuple[str, ...] = ()
    protocols: tuple[str, ...] = (LEFT_OUT, PERSONAL)


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
        SPEC | EMOJI,
    ),
    "names": Data(
        "emoji:{domain}?level=names&test={target}&drawn_by=contrast+notomono+fxemoji",
        ("contrast", "notomono", "fxemoji"),
        (),
        "symbols",
        None,
        SPEC | EMOJI | {"training": {"epochs": 2, "batch_size": 32, "schedule": "cosine"}},
        targets=("contrast", "notomono"),
        protocols=(LEFT_OUT,),
    ),
}
TEXT, VISUAL = (0.01, 0.05, 0.2), (0.05, 0.2, 0.8)
TOWERS = (1e-4, 3e-4, 1e-3)
TOWER_HEADS, PROMPT_HEADS = (0.003, 0.01, 0.03), (0.01, 0.05, 0.2)  # beside towers, beside prompts
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
    Method("fedavg, linear head", "fedavg:head=linear", TOWERS, head_rates=TOWER_HEADS),
    Method("fedprox", "fedprox", like="fedavg"),
    Method("fedprox, last block", "fedprox:trainable=last_k", like="fedavg, last block"),
    Method("tip_adapter", "tip_adapter:rounds=1"),
    Method("fedgda", "fedgda:rounds=1"),
    Method("fedmgp", "fedmgp", (0.01, 0.1)),
    Method("pfedmma", "pfedmma", TEXT),
    Method("singleset_vpt, own head", f"singleset_vpt:m=8:{OWN_HEAD}", like="fedvpt, own head"),
    Method("fedvpt, own head", f"fedvpt:m=8:{OWN_HEAD}", VISUAL, head_rates=PROMPT_HEADS),
    Method("pfedpg", "pfedpg:m=8:training.weight_decay=0.001", VISUAL, head_rates=PROMPT_HEADS),
    Method("singleset_full", "singleset_full", like="fedavg"),
    Method("singleset_full, own head", "singleset_full:head=linear", TOWERS, head_rates=TOWER_HEADS),
    Method("fedrep", "fedrep", TOWERS, head_rates=TOWER_HEADS),
    Method("fedbabu", "fedbabu", TOWERS, head_rates=TOWER_HEADS),
    Method("fedrod", "fedrod", TOWERS, head_rates=TOWER_HEADS),
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


def choose(name: str, methods: Sequence[Method], out: Path) -> tuple[list[BenchEntry], list[Swept]]:
    """Every method's entry at the best of its rates, and how it was chosen, on held-out images of the other styles.

    ``out`` is the folder of all data sets: rates may have been chosen on another one (`Data.rates_of`).
    """
    rates_of = DATA[name].rates_of
    data, runner = DATA[rates_of], Runner(out / rates_of / "rates")
    wanted = {method.like for method in methods}
    tried = [each for each in METHODS if each.rates and (each in methods or each.label in wanted)]
    found: dict[str, Swept] = {}
    for rates in dict.fromkeys(each.rates for each in tried):
        own = [each for each in tried if each.rates == rates]
        entries = [parse_entry(text, label) for each in own for label, text in each.tried().items()]
        bench = Bench(KNOWN[PERSONAL], entries, setting(data, data.sweep), (0,), data.spec)
        _, rows = sweep(bench, Grid(rates, (SWEEP_SEED,), SHARE), lambda trial: run_shown(trial, runner))
        found |= {row.label: row for row in rows}
    chosen = []
    for each in methods:
        [source] = [one for one in METHODS if one.label == (each.like or each.label)]
        rate, best = "", best_of(source, found)
        if best is not None:
            rate = source.tried()[best.label].removeprefix(source.entry) + f":training.learning_rate={best.chosen}"
        chosen.append(parse_entry(each.entry + rate, each.label))
    return chosen, [found[label] for each in tried for label in each.tried()]


def best_of(method: Method, found: Mapping[str, Swept]) -> Swept | None:
    """Of the method's rates of a head the one that leads furthest, the smallest of those that do; None without any."""
    rows = [found[label] for label in method.tried() if label in found]
    return max(rows, key=lambda row: row.by_rate[row.chosen], default=None)


def benches(name: str, entries: Sequence[BenchEntry], seeds: Sequence[int], every: bool) -> dict[str, list[Bench]]:
    """For each protocol a bench for each seed. ``every``: each style is left out, else the one whose turn it is."""
    data = DATA[name]
    found: dict[str, list[Bench]] = {protocol: [] for protocol in data.protocols}
    for place, seed in enumerate(seeds):
        turn = data.targets or (() if every else (data.domains[place % len(data.domains)],))
        for protocol, own in found.items():
            given = replace(setting(data, data.domains), targets=turn if protocol == LEFT_OUT else ())
            own.append(Bench(KNOWN[protocol], entries, given, (seed,), data.spec))
    return found


def gather(
    name: str, entries: Sequence[BenchEntry], swept: Sequence[Swept], planned: Planned, folder: Path
) -> dict[str, Any]:
    """Both tables, the rates and the answers to the questions, of the runs that are there."""
    out = folder / name
    record: dict[str, Any] = {
        "data": name,
        "spec": DATA[name].spec,
        "setting": asdict(replace(setting(DATA[name], DATA[name].domains), targets=DATA[name].targets)),
        "rates_of": DATA[name].rates_of,
        "rates": [row.model_dump() for row in swept],
        "chosen": {entry.label: written(entry) for entry in entries},
    }
    for protocol, by_seed in planned.items():
        runner = Runner(out / protocol)
        whole = [with_runs(bench, runner) for bench in by_seed]
        runs = [run for _, own in whole for run in own]
        measures = [row.model_dump(mode="json", exclude={"reliability"}) for row in measures_of(runs)]
        record[protocol] = {
            "table": table([(bench, own) for bench, own in whole if bench.entries]),
            "measures": measures,
            "questions": answers(protocol, runs),
            "seconds": round(sum(run.wall_seconds + run.setup_seconds for run in runs)),
            "provenance": [json.loads(text) for text in sorted({json.dumps(run.provenance) for run in runs})],
        }
    return record


def with_runs(bench: Bench, runner: Runner) -> tuple[Bench, list[BenchRun]]:
    """The bench with those of its entries of which all federations are done, and these."""
    jobs = bench.jobs()
    missing = {job.entry.label for job in jobs if not runner.path(job).exists()}
    whole = replace(bench, entries=[entry for entry in bench.entries if entry.label not in missing])
    return whole, [runner.run(job) for job in jobs if job.entry.label not in missing]


def table(whole: Sequence[tuple[Bench, list[BenchRun]]]) -> list[dict[str, Any]]:
    """A row for each method: its seeds, for each of them fractions by column, and the mean costs."""
    rows: dict[str, dict[str, Any]] = {}
    for bench, runs in whole:
        for row in rows_of(bench, runs):
            own = rows.setdefault(
                row.label, {"label": row.label, "zero_shot": row.zero_shot, "seeds": [], "scores": []}
            )
            own["seeds"] += bench.seeds
            own["scores"] += row.scores
            own.setdefault("spent", []).append(row.costs)
    for row in rows.values():
        spent = row.pop("spent")
        row["costs"] = None if None in spent else {key: fmean(each[key] for each in spent) for key in spent[0]}
    return list(rows.values())


def answers(protocol: str, runs: Sequence[BenchRun]) -> list[dict[str, Any]]:
    """Each question whose two rows are there, with the paired tests over its pictures (`comparison`)."""
    found, kind = [], "unseen" if protocol == LEFT_OUT else "test"
    labels = {run.label for run in runs}
    for question, a, b in QUESTIONS[protocol]:
        if {a, b} <= labels:
            pairs = compare(answers_of(runs, a), answers_of(runs, b))
            [pair] = [one for one in pairs if one.test_set == kind]
            found.append({"question": question} | pair.model_dump(mode="json"))
    return found


def commands(name: str, methods: Sequence[Method], entries: Sequence[BenchEntry], planned: Planned) -> str:
    """What makes the same with `promptfed bench`: the spec's file, a command for the rates, and the planned benches.

    ``entries`` are those of ``methods`` at the rates that were chosen.
    """
    data = DATA[name]
    tried = [
        f"{text}:training.learning_rate={rate}"
        for each in methods
        for text in each.tried().values()
        for rate in each.rates
    ]
    lines = [f"# image-{name}.yaml: {yaml.safe_dump(data.spec, default_flow_style=True, width=1000).strip()}"]

    def line(protocol: str, domains: Sequence[str], options: str, texts: Sequence[str], folder: str = "") -> None:
        shots = f" --shots {data.shots}" if data.shots else ""
        where = f"--data '{data.uri}' --domains {','.join(domains)}{shots} --spec image-{name}.yaml"
        out = f"--out results/image/{name}/{folder or protocol}"
        lines.append(f"promptfed bench {protocol} {where} {options} {out} --methods '{','.join(texts)}'")

    if data.rates_of == name:
        line(PERSONAL, data.sweep, f"--validation {SHARE} --seeds {SWEEP_SEED}", tried, "rates")
    for protocol, by_seed in planned.items():
        seeds: dict[tuple[str, ...], list[int]] = {}
        for bench in by_seed:
            seeds.setdefault(bench.setting.targets, []).extend(bench.seeds)
        for targets, numbers in seeds.items():
            only = f"--targets {','.join(targets)} " if targets else ""
            line(protocol, data.domains, f"{only}--seeds {','.join(map(str, numbers))}", list(map(written, entries)))
    return "\n".join(lines)


def written(entry: BenchEntry) -> str:
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
    command.add_argument(
        "--into", type=Path, help="a former summary.json, whose rows of --methods are renewed in place"
    )
    command.add_argument("--beside", default="", help="rows that run again at the rates of --into, as --methods")
    command.add_argument("--commands", action="store_true", help="print the commands, with the rates that were chosen")
    command.add_argument("--gather", action="store_true", help="run nothing more, make the summary of what is there")
    command.add_argument("--every-target", action="store_true", help="leave each style out for each seed")
    options = command.parse_args(arguments)
    wanted = options.methods.split(";") if options.methods else [each.label for each in METHODS]
    methods = [each for each in METHODS if each.label in wanted]
    if len(methods) < len(wanted):
        command.error(f"--methods: there are {'; '.join(each.label for each in METHODS)}")
    entries, swept = choose(options.data, methods, options.out)
    former = json.loads(options.into.read_text(encoding="utf-8")) if options.into else None
    if former is not None:
        entries += [parse_entry(former["chosen"][label], label) for label in options.beside.split(";") if label]
    planned = benches(options.data, entries, options.seeds, options.every_target)
    if options.commands:
        print(commands(options.data, methods, entries, planned))
        return
    if not options.gather:
        for place in range(len(options.seeds)):
            for protocol, by_seed in planned.items():
                run_shown(by_seed[place], Runner(options.out / options.data / protocol))
    record, order = gather(options.data, entries, swept, planned, options.out), [each.label for each in METHODS]
    summary = options.into or options.out / options.data / "summary.json"
    if former is not None:
        record = renewed(former, record, [each.label for each in methods], order)
    write_whole(summary, (json.dumps(record, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode())


if __name__ == "__main__":
    main()
