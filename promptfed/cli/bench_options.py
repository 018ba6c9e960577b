"""The options of `promptfed bench`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from promptfed.cli.common import Device, Pool


@dataclass(frozen=True)
class BenchOptions:
    """What `promptfed bench` runs and how; `Setting` has the fields that describe the protocol's setting."""

    out: Annotated[
        Path | None, typer.Option(help="folder for results; finished federations in it are not run again")
    ] = None
    methods: Annotated[
        str, typer.Option(help="entries by commas, each NAME[:KEY=VALUE]..., as plan:residual=false")
    ] = ""
    data: Annotated[
        list[str] | None, typer.Option(help="data URI, repeatable; {domain} stands for each of --domains")
    ] = None
    root: Annotated[str, typer.Option(help="folder of the data sets, for paper:TABLE")] = "data"
    seeds: Annotated[str | None, typer.Option(help="seeds by commas; default: 0,1,2")] = None
    reduced: Annotated[bool, typer.Option("--reduced", help="embedded: seed 0 and fewer targets")] = False
    domains: Annotated[str, typer.Option(help="names by commas, for data with {domain}")] = ""
    targets: Annotated[str, typer.Option(help="leave-one-domain-out: only these as targets")] = ""
    class_names: Annotated[
        Literal["same", "union", "intersection"],
        typer.Option(help="where domains have other classes: tell all apart everywhere, or leave out what some lack"),
    ] = "same"
    domain_words: Annotated[
        list[str] | None,
        typer.Option(help="NAME=WORDS: what a domain's images look like, repeatable", show_default=False),
    ] = None
    clients: Annotated[int, typer.Option(min=1, help="clients that each data set is divided over")] = 10
    classes_per_client: Annotated[int | None, typer.Option(min=1, help="instead of --clients, base-to-novel")] = None
    partition: Annotated[str, typer.Option(help="pathological, dirichlet or iid, for personalisation")] = "pathological"
    alpha: Annotated[float, typer.Option(help="of the Dirichlet distribution")] = 0.1
    shots: Annotated[int | None, typer.Option(min=1, help="training images of each class and client")] = None
    curve: Annotated[str, typer.Option(help="numbers of shots for few-shot, by commas")] = "1,2,4,8,16"
    validation: Annotated[
        float | None, typer.Option(help="test on this share of the training images, to choose hyperparameters")
    ] = None
    target_images: Annotated[
        Literal["test", "all"], typer.Option(help="leave-one-domain-out: test the target on its test split or on all")
    ] = "test"
    test_images: Annotated[
        Literal["redrawn", "same"], typer.Option(help="draw test images anew for each seed, or use the same")
    ] = "redrawn"
    out_of_client: Annotated[
        bool, typer.Option("--out-of-client", help="personalisation: each client's classifier on the others' tests too")
    ] = False
    swap_prompts: Annotated[
        bool, typer.Option("--swap-prompts", help="personalisation: others' prompts under each client's own head too")
    ] = False
    rounds: Annotated[int | None, typer.Option(min=1, help="default: the method's")] = None
    steps: Annotated[
        int | None, typer.Option(min=1, help="optimizer steps of a client in all, instead of --rounds")
    ] = None
    sweep: Annotated[
        str, typer.Option(help="rates by commas: each method's is chosen on --validation images, then tested")
    ] = ""
    sweep_seeds: Annotated[str, typer.Option(help="seeds of the sweep, by commas")] = "10"
    m: Annotated[int | None, typer.Option(min=1, help="prompt tokens, for every method that has them")] = None
    spec: Annotated[Path | None, typer.Option(help="YAML laid under every method's spec: training, ...")] = None
    pool: Pool = 1
    device: Device = "cpu"
