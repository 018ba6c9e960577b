"""`promptfed methods`: the methods, and what each sends. `promptfed init`: a folder that runs, to begin with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from promptfed.cli.app import app
from promptfed.cli.common import Json, Written, refuse
from promptfed.console.files import new_folder
from promptfed.console.output import console, listing, print_json, say, table
from promptfed.shared.errors import BadInput, PromptfedError
from promptfed.shared.spec.spec import SpecError

START = Path(__file__).parents[1] / "start"
RUN = "run.yaml"


@app.add(section="Try and simulate")
def init(
    written: Written,
    folder: Annotated[Path | None, typer.Argument(help="a new or empty folder")] = None,
    preset: Annotated[
        str | None, typer.Option("--from", help="run.yaml with a paper's settings, as paper:fedpgp-office")
    ] = None,
    root: Annotated[Path, typer.Option(help="with --from: the folder with the papers' data sets")] = Path("data"),
    presets: Annotated[bool, typer.Option("--list", help="list the papers' settings, and end")] = False,
) -> None:
    """Make a folder that runs: a run file with comments, a method of your own, its test, and how to go on."""
    refuse(written & {"folder", "preset", "root"} if presets else set(), "--list makes no folder; leave it out")
    refuse(written & {"root"} if preset is None else set(), "for --from; leave it out")
    if presets:
        from promptfed.experiments.bench.presets import preset_names, read_preset

        listing([(name, read_preset(name).title) for name in preset_names()])
        return
    if folder is None:
        raise BadInput("name a new folder, as in: promptfed init mine")
    run, missing = ((START / RUN).read_text(), "") if preset is None else _of_paper(preset, root)
    with new_folder(folder):
        for file in START.iterdir():
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
        (folder / RUN).write_text(run)
    if missing:
        say(f"{folder} has the settings, and `simulate` refuses until its data are there: {missing}")
    else:
        say(f"{folder} is ready. Go on with: cd {folder} && promptfed simulate {RUN}")


def _of_paper(name: str, root: Path) -> tuple[str, str]:
    """The run file of the first federation of a paper's table, by the table's last method, and what data it lacks."""
    import yaml

    from promptfed.experiments.bench.presets import read_preset
    from promptfed.experiments.bench.protocols import without_data
    from promptfed.runtime.run_file import ClientEntry
    from promptfed.shared.data import DataError

    preset = read_preset(name)
    panel = preset.panels()[0]
    bench, missing = preset.bench((0,), panel=panel, root=str(root.absolute())), ""
    try:
        jobs = bench.jobs()
    except DataError as error:
        missing = f"{str(error).rstrip('.')}; {preset.wanted(str(root))}"
        with without_data():
            jobs = bench.jobs()
    except PromptfedError as error:
        raise BadInput(f"{str(error).rstrip('.')}; {preset.wanted(str(root))}") from None
    last_method = list(preset.methods)[-1]
    job = next(job for job in jobs if job.entry.label == last_method)
    clients = [
        ClientEntry(
            name=site.name, data=site.data, role=site.role, tests=dict(site.tests), domain=site.domain
        ).model_dump(exclude_defaults=True)
        for site in job.trial.sites
    ]
    head = [f"# {preset.title}", f"# The table's methods: {', '.join(preset.methods)}"]
    if preset.each:
        head.append(f"# Its data sets: {', '.join(preset.each)}; here {panel}")
    if missing:
        head += [f"# Missing: {missing}", "# Make it again then: class names and their division come from them."]
    run = {**job.spec, "name": name.partition(":")[2], "clients": clients}
    if missing:
        run.pop("class_names", None)
    plain = json.loads(json.dumps(run))  # YAML has no tuples
    return "\n".join(head) + "\n" + yaml.safe_dump(plain, sort_keys=False, width=120), missing


@app.add(section="Try and simulate")
def methods(
    name: Annotated[str | None, typer.Argument(help="one method, in full")] = None, as_json: Json = False
) -> None:
    """List the methods, or describe one: the tensors of each phase, and hyperparameters with their defaults."""
    from promptfed.shared.methods import METHODS, describe

    if name is None:
        listed = [describe(method_name) for method_name in sorted(METHODS)]
        if as_json:
            print_json(listed)
            return
        listing([(method["name"], _summary(method)) for method in listed])
        return
    try:
        method = describe(name)
    except SpecError as error:
        raise BadInput(error.errors[0]["detail"]) from None
    if as_json:
        print_json(method)
        return
    console.print(f"[bold]{name}[/bold]: {_summary(method)}\n{method['paper']}\n", highlight=False)
    console.print(table("Hyperparameters", ["name", "default", "meaning"], _hyperparameters(method)))
    rows = [
        [phase["name"], "; ".join(map(_tensor, phase["down"])) or "-", "; ".join(map(_tensor, phase["up"])) or "-"]
        for phase in method["phases"]
    ]
    console.print(table("What travels", ["phase", "down", "up"], rows))


def _summary(method: dict[str, Any]) -> str:
    from promptfed.shared.methods import METHODS

    package = METHODS.package(method["name"])
    return f"{method['summary']} (from {package})" if package else str(method["summary"])


def _tensor(tensor: dict[str, Any]) -> str:
    return f"{tensor['name']} ({', '.join(map(str, tensor['shape']))}) {tensor['dtype']}"


def _hyperparameters(method: dict[str, Any]) -> list[list[str]]:
    return [
        [key, str(schema.get("default", "-")).replace("None", "none"), schema.get("description", "")]
        for key, schema in method["hyperparameters"].get("properties", {}).items()
    ]
