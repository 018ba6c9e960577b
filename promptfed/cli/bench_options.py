"""What `promptfed bench` takes beside what other commands take too."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Results = Annotated[
    list[str] | None, typer.Argument(help="compare: two of FOLDER[#ROW]; verify: one FOLDER", show_default=False)
]
Out = Annotated[Path | None, typer.Option(help="folder for results; finished federations in it are not run again")]
Root = Annotated[str, typer.Option(help="folder of the data sets, for paper:TABLE")]
Seeds = Annotated[str | None, typer.Option(help="by commas; default: 0,1,2")]
Reduced = Annotated[bool, typer.Option("--reduced", help="embedded: seed 0 and fewer targets")]
Panels = Annotated[str, typer.Option(help="embedded: only the panels of these numbers, as 1,7")]
Domains = Annotated[str, typer.Option(help="by commas, for data with {domain}")]
Targets = Annotated[str, typer.Option(help="leave-one-domain-out: only these as targets")]
ClassNames = Annotated[
    Literal["same", "union", "intersection"],
    typer.Option(help="where domains have other classes: tell all apart everywhere, or leave out what some lack"),
]
DomainWords = Annotated[
    list[str] | None, typer.Option(help="NAME=WORDS: what a domain's images look like, repeatable", show_default=False)
]
Clients = Annotated[int, typer.Option(min=1, help="clients that each data set is divided over")]
ClassesPerClient = Annotated[int | None, typer.Option(min=1, help="instead of --clients, base-to-novel")]
Alpha = Annotated[float, typer.Option(help="of the Dirichlet distribution")]
Shots = Annotated[int | None, typer.Option(min=1, help="training images of each class and client")]
Curve = Annotated[str, typer.Option(help="numbers of shots for few-shot, by commas")]
TargetImages = Annotated[
    Literal["test", "all"], typer.Option(help="leave-one-domain-out: test the target on its test split or on all")
]
TestImages = Annotated[
    Literal["redrawn", "same"], typer.Option(help="test images that a source draws: others for each seed, or not")
]
OutOfClient = Annotated[
    bool, typer.Option("--out-of-client", help="personalisation: each client's classifier on the others' tests too")
]
SwapPrompts = Annotated[
    bool, typer.Option("--swap-prompts", help="personalisation: others' prompts under each client's own head too")
]
UnseenClasses = Annotated[
    bool, typer.Option("--unseen-classes", help="base-to-novel: novel images among base names too, for AUROC and FPR95")
]
Rounds = Annotated[int | None, typer.Option(min=1, help="default: the method's")]
Steps = Annotated[int | None, typer.Option(min=1, help="optimizer steps of a client in all, instead of --rounds")]
Sweep = Annotated[
    str, typer.Option(help="rates by commas: each method's is chosen on --validation images, then tested")
]
SweepSeeds = Annotated[str, typer.Option(help="seeds of the sweep, by commas")]
M = Annotated[int | None, typer.Option(min=1, help="prompt tokens, for every method that has them")]
Spec = Annotated[Path | None, typer.Option(help="YAML laid under every method's spec: backbone, training, ...")]
Cell = Annotated[str, typer.Option(help="verify: ROW[,SEED[,TRIAL]] of the run; default: the one that took least time")]
Tolerance = Annotated[float, typer.Option(min=0, help="verify: points that accuracies may be apart")]
