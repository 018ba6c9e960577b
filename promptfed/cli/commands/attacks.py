"""`promptfed audit`: membership inference against an export, stored updates, or simulated shadow runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from promptfed.cli.app import Made, app
from promptfed.cli.common import AllowBackbone, Federation, Json
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.output import console, print_json, say, table

group = app.group("audit", "Attack a result: can its training images be told from others?", "Use a result")

Members = Annotated[str, typer.Option(help="train or test: the part that was trained on")]
Others = Annotated[str, typer.Option("--non-members", help="the part that was not")]
Delta = Annotated[float, typer.Option(min=0, max=0.1, help="δ of the bound on ε")]


def _parts(members: Members = "train", others: Others = "test") -> tuple[str, str]:
    if {members, others} != {"train", "test"}:
        raise CommandError("--members and --non-members are train and test, or the other way round", Exit.USAGE)
    return members, others


Parts = Annotated[tuple[str, str], Made(_parts)]


@dataclass(frozen=True)
class Limits:
    """When an attack fails the command."""

    most: Annotated[float | None, typer.Option("--max-auc", help="fail where an attack does better")] = None
    claimed: Annotated[float | None, typer.Option("--epsilon", help="fail where the bound on ε is over this one")] = (
        None
    )

    def judge(self, attacks: Sequence[Any]) -> None:
        """Raise CommandError if an attack does better than was allowed, or than was claimed."""
        best = max(attacks, key=lambda attack: attack.auc)
        if self.most is not None and best.auc > self.most:
            text = f"the attack {best.name} has an AUC of {best.auc:.3f}, over {self.most:g}"
            raise CommandError(text, Exit.BAD_INPUT)
        bound = max(attacks, key=lambda attack: attack.epsilon)
        self.hold(f"the attack {bound.name}", bound.epsilon)

    def hold(self, name: str, bound: float, claimed: float | None = None) -> None:
        """Raise CommandError if a lower bound on ε is over the claimed ε; ``claimed`` counts where none was given."""
        limit = claimed if self.claimed is None else self.claimed
        if limit is not None and bound > limit:
            text = f"{name} shows ε ≥ {bound:.2f}, and {limit:g} is claimed: the mechanism is broken, or the claim"
            raise CommandError(text, Exit.BAD_INPUT)


Limited = Annotated[Limits, Made(Limits)]


@group.add("export")
def audit_export(
    export: Annotated[Path, typer.Argument(help="folder that `promptfed export` has written")],
    data: Annotated[str, typer.Option(help="data URI of an owner whose images were trained on")],
    parts: Parts,
    limits: Limited,
    allow_backbone: AllowBackbone,
    references: Annotated[
        list[Path] | None, typer.Option(help="an export that was trained without these images; four or more")
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="write the figures into the export, as audit.json")] = False,
    as_json: Json = False,
) -> None:
    """Attack the final prompts with images that were trained on, and others of the same owner."""
    from promptfed.cli.attacking import attack_export

    attacks = attack_export(export, data, parts, references or [], allow_backbone)
    if write:
        from promptfed.export.audited import note_audit

        note_audit(export, [_figures(attack) for attack in attacks])
    _tell(attacks, as_json)
    limits.judge(attacks)


@group.add("updates")
def audit_updates(
    federation: Federation,
    store: Annotated[Path, typer.Option("--data-dir", help="a coordinator's data folder, which is not in use")],
    client: Annotated[str, typer.Option(help="whose updates are attacked")],
    data: Annotated[str, typer.Option(help="data URI of that client's images")],
    parts: Parts,
    limits: Limited,
    allow_backbone: AllowBackbone,
    images: Annotated[int, typer.Option(min=10, help="of either part, at most: each costs a step a phase")] = 200,
    delta: Delta = 0.0,
    as_json: Json = False,
) -> None:
    """Attack one client's updates as its coordinator keeps them, if operator and owner agree to it."""
    from promptfed.cli.attacking import attack_updates

    attacks = attack_updates(store, federation, client, data, parts, images, delta, allow_backbone)
    _tell(attacks, as_json)
    limits.judge(attacks)


@group.add("run")
def audit_run(
    run: Annotated[Path, typer.Argument(help="a run file, as `promptfed simulate` takes it")],
    limits: Limited,
    allow_backbone: AllowBackbone,
    client: Annotated[str | None, typer.Option(help="whose images are asked about; default: the first trainer")] = None,
    seeds: Annotated[int, typer.Option(min=2, max=256, help="runs, each with another half of the images")] = 10,
    canaries: Annotated[int, typer.Option(min=0, help="images of it that get a wrong label")] = 0,
    delta: Delta = 1e-5,
    as_json: Json = False,
) -> None:
    """Simulate a run many times with other images of one client, and tell which images were trained on.

    The ε that the runs claim is compared with the lower bound that guessing canaries shows.
    """
    from promptfed.cli.attacking import attack_run

    shadows = attack_run(run, client, seeds, canaries, allow_backbone, quiet=as_json)
    attacks, bound = shadows.attacks(delta), shadows.epsilon(delta)
    facts = {"client": shadows.client, "runs": len(shadows.runs), "canaries": int(shadows.canaries.sum())}
    _tell(attacks, as_json, facts | {"epsilon_of_canaries": bound, "epsilon_claimed": shadows.claimed})
    if not as_json and canaries:
        claimed = "nothing" if shadows.claimed is None else f"{shadows.claimed:.3g}"
        say(f"Guessing canaries shows ε ≥ {bound:.2f}; claimed: {claimed}.")
    limits.judge(attacks)
    limits.hold("guessing canaries", bound, shadows.claimed)


def _tell(attacks: Sequence[Any], as_json: bool, facts: Mapping[str, object] | None = None) -> None:
    if as_json:
        print_json({**(facts or {}), "attacks": [asdict(attack) for attack in attacks]})
        return
    columns = ["attack", "AUC (95 %)", "TPR at 1 % FPR", "ε at least"]
    console.print(table(None, columns, [_row(attack) for attack in attacks]))


def _row(attack: Any) -> list[str]:
    rate = next(rate for rate in attack.rates if rate.at == 0.01)
    shown = "too few images" if rate.found is None else f"{rate.found:.1%} ({rate.low:.1%} to {rate.high:.1%})"
    auc = f"{attack.auc:.3f} ({attack.auc_low:.3f} to {attack.auc_high:.3f})"
    return [attack.name, auc, shown, f"{attack.epsilon:.2f}"]


def _figures(attack: Any) -> Any:
    """As `audit.json` has it."""
    from promptfed.export.audited import AuditFigures

    rate = next(rate for rate in attack.rates if rate.at == 0.01).found
    figures = {key: getattr(attack, key) for key in ("members", "others", "auc", "auc_low", "auc_high", "epsilon")}
    return AuditFigures(attack=attack.name, tpr_at_1=rate, **figures)
