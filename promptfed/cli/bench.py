"""`promptfed bench`: methods compared under a protocol."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path

from pydantic import BaseModel
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from promptfed.cli.bench_options import BenchOptions
from promptfed.cli.common import refuse
from promptfed.console.files import write_file
from promptfed.console.output import console, messages, note, print_json, say, table, whole_numbers
from promptfed.experiments.bench import tables
from promptfed.experiments.bench.entries import RawSpec, parse_entries
from promptfed.experiments.bench.plots import draw
from promptfed.experiments.bench.presets import REDUCED_SEEDS, SEEDS, SUITES, preset_names, presets_of, read_preset
from promptfed.experiments.bench.protocols import PROTOCOLS, Setting
from promptfed.experiments.bench.runner import (
    Bench,
    BenchRun,
    Job,
    ResultProvenance,
    Runner,
    claim,
    provenance,
    read_run,
    write_json,
)
from promptfed.shared import get_extra
from promptfed.shared.errors import BadInput, PromptfedError
from promptfed.shared.plain_text import listed
from promptfed.shared.service.yaml_text import read_mapping
from promptfed.shared.spec.spec import AllowedBackbones

EVALUATIONS = 10  # of a federation beside the first: a curve, for a tenth of what evaluating each round may cost
MISSING = ("there is no folder", ", or is not whole")  # in errors of data that a preset looks for

# Options that each kind of run uses, by their parameters, besides those that all use.
_ALL = frozenset(
    {"protocol", "out", "seeds", "pool", "device", "allow_backbone", "backbone_file", "new_data", "as_json"}
)

_SUITE = _ALL | {"reduced"}
_PRESET = _ALL | {"root", "spec", "rounds"}


def run_shown(bench: Bench, runner: Runner) -> list[BenchRun]:
    """Every run of the bench, with a bar at a terminal and a line for each federation elsewhere."""
    columns = (
        BarColumn(20),
        MofNCompleteColumn(),
        TextColumn("federations"),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    jobs = bench.jobs()
    claim(runner.out, bench)
    for line in dict.fromkeys(f"{job.entry.label}: {job.chosen}" for job in jobs if job.chosen is not None):
        note(line)
    finished = sum(runner.path(job).exists() for job in jobs)
    if finished:
        note(f"{finished} of {len(jobs)} federations are done in {runner.out}{_of_others(runner, jobs)}")
    with Progress(*columns, console=messages, disable=not messages.is_terminal) as progress:
        bar = progress.add_task("", total=None)

        def show(done: int, total: int, job: Job) -> None:
            progress.update(bar, completed=done, total=total, description=escape(job.title))
            if not messages.is_terminal:
                note(f"{done + 1} of {total}: {job.title}")

        return runner.run_all(jobs, show)


def _of_others(runner: Runner, jobs: Sequence[Job]) -> str:
    """How many finished federations other packages or another commit computed than those that are here."""
    here = provenance().model_dump(include={"packages", "commit"})
    done = [read_run(path).provenance for job in jobs if (path := runner.path(job)).exists()]
    others = sum(computed_by != {} and {name: computed_by.get(name) for name in here} != here for computed_by in done)
    return f", {others} of them by other packages or another commit (results.json says which)" if others else ""


def run_bench(
    protocol: str, options: BenchOptions, allow_backbone: AllowedBackbones, written: Set[str], as_json: bool
) -> None:
    """Run a bench; ``written`` are the parameters that the command line gives.

    Raises:
        PromptfedError: what is wrong with options or data.
    """
    if options.out is None:
        raise BadInput(f"bench {protocol} needs a folder for its results: give --out")
    setting = setting_of(options)
    refuse_unused(protocol, setting, written)
    runner = Runner(options.out, options.pool, options.device, allow_backbone, options.new_data)
    seeds, spec, rounds = options.seeds or "0,1,2", options.spec, options.rounds
    if protocol in SUITES:
        run_suite(protocol, runner, options.reduced, options.seeds, as_json)
        return
    if protocol.startswith("paper:"):
        run_preset(protocol, options.root, seeds, runner, spec, rounds, as_json)
        return
    results = finish(make_bench(protocol, options.methods, setting, seeds, spec, rounds, options.m), runner, as_json)
    if as_json:
        print_json(results.model_dump(exclude={"runs"}))


def setting_of(options: BenchOptions) -> Setting:
    """The setting of a protocol that the options describe.

    Raises:
        PromptfedError: ``--curve`` is no list of numbers.
    """
    lists = {
        "data": tuple(options.data or ()),
        "domains": names_of(options.domains),
        "targets": names_of(options.targets),
        "curve": whole_numbers(options.curve, "--curve"),
    }
    settings = {field.name: getattr(options, field.name) for field in fields(Setting) if hasattr(options, field.name)}
    return Setting(**settings | lists)


def names_of(text: str) -> tuple[str, ...]:
    """The names in ``a,b``; none in an empty text. Raises PromptfedError."""
    try:
        return tuple(listed(text)) if text.strip() else ()
    except ValueError as error:
        raise BadInput(str(error)) from None


def refuse_unused(protocol: str, setting: Setting, written: Set[str]) -> None:
    """Refuse options of the command line that would change nothing.

    Raises:
        PromptfedError: there are such options.
    """
    if protocol in SUITES:
        unused, reason = written - _SUITE, "its panels set the rest"
    elif protocol.startswith("paper:"):
        unused, reason = written - _PRESET, "the preset sets the rest"
    elif protocol in PROTOCOLS:
        idle = {field.name for field in fields(Setting)} - {"data"} - PROTOCOLS[protocol].used(setting)
        unused = written & (idle | {"reduced", "root"})
        reason = "it looks at none with this data and these options"
    else:
        return  # `make_bench` says so
    refuse(unused, f"{reason}; leave it out", f"bench {protocol} takes no ")


def make_bench(
    protocol: str, methods: str, setting: Setting, seeds: str, spec: Path | None, rounds: int | None, m: int | None
) -> Bench:
    """The bench that the command line describes.

    Raises:
        PromptfedError: an unknown protocol or method, seeds that are no numbers, a spec file that cannot be read.
    """
    if protocol not in PROTOCOLS:
        near = get_close_matches(protocol, [*PROTOCOLS, *preset_names()], n=3) or [*PROTOCOLS, "a preset, paper:NAME"]
        raise BadInput(f"there is no protocol {protocol!r}: use one of {', '.join(near)}")
    numbers = whole_numbers(seeds, "--seeds")
    if not setting.data:
        raise BadInput("no data is given: write --data symbols:neon")
    _check(protocol, setting)
    base = _base(spec, rounds)
    return Bench(PROTOCOLS[protocol], parse_entries(methods), setting, numbers, base, m, evaluations=EVALUATIONS)


def _check(protocol: str, setting: Setting) -> None:
    """No name is given twice, and the data leave to the protocol what it sets itself."""
    for uri in setting.data:
        named = {part.partition("=")[0] for part in uri.partition("?")[2].split("&")}
        ours = {"client", "clients", "classes_per_client", "partition", "alpha"}
        ours |= {"classes"} if protocol.endswith("base-to-novel") else set()
        ours |= {"shots"} if setting.shots is not None or protocol.startswith("few-shot") else set()
        ours |= {"validation"} if setting.validation is not None else set()
        if named & ours:
            text = f"--data {uri}: bench {protocol} sets {min(named & ours)} itself; leave it out of the URI"
            raise BadInput(text)
    for option, names in (("--domains", setting.domains), ("--targets", setting.targets), ("--data", setting.data)):
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise BadInput(f"{option}: {twice[0]} is given twice; leave one out")
    if min(setting.curve) < 1:
        raise BadInput("--curve: the numbers of shots must be at least 1")


class BenchResults(BaseModel):
    """``results.json``: a bench, its table, and the runs that this was made of."""

    protocol: str
    setting: Setting
    methods: list[str]
    seeds: list[int]
    table: list[tables.TableRow]
    runs: list[BenchRun]
    provenance: ResultProvenance
    measures: list[tables.Measures] = []


def finish(bench: Bench, runner: Runner, as_json: bool, paper: Sequence[tables.TableRow] = ()) -> BenchResults:
    """Run it, write ``results.json``, ``table.md`` and plots into the runner's folder, and show the table.

    ``paper`` are rows that a paper prints, shown behind ours of the same label.

    Raises:
        PromptfedError: a federation that cannot be run; what was finished is kept and not run again.
    """
    runs = run_shown(bench, runner)
    rows = tables.interleaved(tables.rows_of(bench, runs), paper)
    results = BenchResults(
        protocol=bench.protocol.name,
        setting=bench.setting,
        methods=[entry.label for entry in bench.entries],
        seeds=list(bench.seeds),
        table=rows,
        runs=runs,
        provenance=provenance(),
        measures=tables.measures_of(runs),
    )
    write_json(runner.out / "results.json", results)
    lines = [tables.markdown(bench, rows), *tables.measures_table(results.measures)]
    write_file(runner.out / "table.md", ("\n".join(lines) + "\n").encode())
    plots: list[str] = []
    try:
        plots = [path.name for path in draw(bench, rows, runs, runner.out)]
    except ModuleNotFoundError:
        note(f"No plots, which need matplotlib: {get_extra('plots')}")
    if not as_json:
        _show(bench, results)
        say(f"Wrote {', '.join(['results.json', 'table.md', *plots])} in {runner.out}.")
    return results


def run_suite(suite: str, runner: Runner, reduced: bool, seeds: str | None, as_json: bool) -> None:
    """Run a suite of `SUITES`, a folder for each preset.

    Raises:
        PromptfedError: as `finish`.
    """
    numbers = whole_numbers(seeds, "--seeds") if seeds else REDUCED_SEEDS if reduced else SEEDS
    benches = {name: preset.bench(numbers, reduced=reduced) for name, preset in presets_of(suite).items()}
    made, missing = {}, dict[str, str]()
    for bench in benches.values():  # all before the first, which may take an hour
        try:
            bench.jobs()
        except PromptfedError as error:
            missing.setdefault(str(error).partition(": ")[2], str(error))  # once for data of one source
    if missing:
        raise BadInput(" ".join(missing.values()))
    for name, preset in presets_of(suite).items():
        in_folder = replace(runner, out=runner.out / name, features=runner.out / "features")
        if not as_json:
            say(preset.title)
        results = finish(benches[name], in_folder, as_json)
        made[name] = results.model_dump(exclude={"runs"})
    if as_json:
        print_json(made)


def _show(bench: Bench, results: BenchResults) -> None:
    header, lines = tables.cells(bench.columns, results.table)
    for columns in (range(1, len(header) - len(tables.COSTS)), range(len(header) - len(tables.COSTS), len(header))):
        shown = [0, *columns]  # accuracies, then costs: one table would be too wide for most terminals
        console.print(table(None, [header[k] for k in shown], [[line[k] for k in shown] for line in lines]))
    if any(tables.BELOW in text for line in lines for text in line):
        say(f"{tables.BELOW}: below zero-shot.")
    header, lines = tables.measures_cells([row for row in results.measures if row.over_zero_shot is not None])
    if lines:
        console.print(table("95 % intervals over images", header[:4], [line[:4] for line in lines]))
    for remark in tables.far_below(bench.columns, results.table):
        say(remark)


def run_preset(
    name: str, root: str, seeds: str, runner: Runner, spec: Path | None, rounds: int | None, as_json: bool
) -> None:
    """Run a paper's table with its settings, a folder for each panel; ``spec`` and ``rounds`` change them.

    Raises:
        PromptfedError: there is no such preset, or its data is not where it is looked for.
    """
    preset, numbers = read_preset(name), whole_numbers(seeds, "--seeds")
    changes = _base(spec, rounds)
    for panel in preset.panels():
        panel_runner = replace(runner, out=runner.out / panel) if len(preset.panels()) > 1 else runner
        if not as_json:
            say(preset.title + (f": {panel}" if panel_runner is not runner else ""))
        bench = preset.bench(numbers, panel=panel, root=root, changes=changes)
        try:
            results = finish(bench, panel_runner, as_json, preset.figures(panel))
        except PromptfedError as error:
            if Path(root).is_dir() and not any(text in str(error) for text in MISSING):
                raise
            raise error.saying(f"{error} ({preset.wanted(root)})") from None
        if as_json:
            print_json(results.model_dump(exclude={"runs"}))
    if preset.notes and not as_json:
        say(preset.notes)


def _base(spec: Path | None, rounds: int | None) -> RawSpec:
    base = read_mapping(spec) if spec is not None else {}
    if "method" in base:
        raise BadInput(f"{spec} names a method: leave it out, --methods names them")
    if "seed" in base:
        raise BadInput(f"{spec} names a seed: leave it out, --seeds names them")
    return base if rounds is None else base | {"rounds": rounds}
