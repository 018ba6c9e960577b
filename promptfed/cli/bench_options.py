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
    rounds: Annotated[int | None, typer.Option(min=1, help="default: the method's")] = None
    m: Annotated[int | None, typer.Option(min=1, help="prompt tokens, for every method that has them")] = None
    spec: Annotated[Path | None, typer.Option(help="YAML laid under every method's spec: training, ...")] = None
    new_data: Annotated[bool, typer.Option(help="run again what was computed on other data than these")] = False
    pool: Pool = 1
    device: Device = "cpu"
