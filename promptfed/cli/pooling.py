"""Figures of several sites for `promptfed pool`: random-effects means and a forest plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, TypeAdapter, ValidationError

from promptfed.cli.forest_plot import forest
from promptfed.cli.scoring import SCORE_FILE, ScoreFigures
from promptfed.cli.scoring_presences import PresenceFigures
from promptfed.cli.scoring_subgroups import SubgroupFigures
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.files import new_folder, write_file
from promptfed.sdk.output import console, print_json, say, table
from promptfed.shared.metrics.clinical import Estimate, interval_text
from promptfed.shared.metrics.pooling import Pooled, PooledFigure, pooled_figure
from promptfed.shared.metrics.site_figures import POOLED
from promptfed.shared.service.reasons import why

POOLED_FILE, FOREST_FILE = "pooled.json", "forest.png"
SiteScores = ScoreFigures | PresenceFigures
_READ: TypeAdapter[SiteScores] = TypeAdapter(SiteScores)


class PooledReport(BaseModel):
    """``state``: the hash of the export that every site has scored."""

    state: str
    images: dict[str, int]
    figures: list[PooledFigure]


def run_pool(scores: Sequence[str], only: str | None, out: Path, as_json: bool) -> None:
    """Pool the figures that sites have written with `promptfed score`, and draw them: of all classes only the AUROCs.

    Raises:
        CommandError: a file cannot be read, two sites have one name or scored different exports, or nobody has the
            class ``only``.
    """
    by_site = read_scores(scores)
    report = pooled_report(by_site, only)
    with new_folder(out, "--out") as folder:
        whole = [each for each in report.figures if each.column is None]
        drawn = [each for each in whole if only is not None or each.figure in ("accuracy", "auroc")]
        picture = forest(_known(drawn))
        write_file(folder / POOLED_FILE, (report.model_dump_json(indent=1) + "\n").encode())
        picture.savefig(folder / FOREST_FILE, dpi=150, bbox_inches="tight")
    if as_json:
        print_json(report.model_dump())
        return
    rows = [
        [subgroup_of(each), each.class_name or "all", POOLED.get(each.figure, each.figure), *mean_cells(each.pooled)]
        for each in report.figures
        if each.pooled is not None
    ]
    heads = ["images", "class", "figure", "sites", "mean, 95 %", "next site", "I²"]
    console.print(table(f"{len(by_site)} sites, {sum(report.images.values())} images", heads, rows))
    say(f"Wrote {POOLED_FILE} and {FOREST_FILE} in {out}.")


def read_scores(scores: Sequence[str]) -> dict[str, SiteScores]:
    """Each site's figures, of ``NAME=PATH`` or ``PATH``: score.json or its folder, which names the site.

    Raises:
        CommandError: as `run_pool`.
    """
    by_site: dict[str, SiteScores] = {}
    for text in scores:
        name, equals, rest = text.partition("=")
        path = Path(rest if equals else text)
        path = path / SCORE_FILE if path.is_dir() else path
        site = name if equals else path.resolve().parent.name
        if site in by_site:
            raise CommandError(f"two sites are called {site}: give NAME=FILE", Exit.BAD_INPUT)
        try:
            by_site[site] = _READ.validate_json(path.read_bytes())
        except OSError as error:
            raise CommandError(f"cannot read {path}: {why(error)}", Exit.BAD_INPUT) from None
        except ValidationError:
            text = f"{path} is not a {SCORE_FILE}: `promptfed score` writes one"
            raise CommandError(text, Exit.BAD_INPUT) from None
    states = {figures.state for figures in by_site.values()}
    if len(by_site) < 2 or len(states) > 1 or None in states:
        reason = "give two sites or more" if len(by_site) < 2 else "the sites have not scored the same export"
        raise CommandError(f"{reason}: each runs `promptfed score` on the same export", Exit.BAD_INPUT)
    return by_site


def pooled_report(by_site: Mapping[str, SiteScores], only: str | None = None) -> PooledReport:
    """The accuracy over all classes, and the figures of each class (or of ``only`` one), pooled over the sites.

    First of all images, then of each subgroup.
    """
    names = list(dict.fromkeys(one.name for figures in by_site.values() for one in figures.classes))
    if only is not None and only not in names:
        raise CommandError(f"no site has images of the class {only}; they have {', '.join(names)}", Exit.BAD_INPUT)
    names = names if only is None else [only]
    groups: dict[tuple[str | None, str | None], dict[str, SiteScores | SubgroupFigures]] = {(None, None): dict(by_site)}
    for site, figures in by_site.items():
        for group in figures.subgroups:
            groups.setdefault((group.column, group.value), {})[site] = group
    all_figures = [
        each.model_copy(update={"column": column, "value": value})
        for (column, value), of_sites in groups.items()
        for each in _pooled(of_sites, names)
    ]
    [state] = {figures.state for figures in by_site.values()}
    assert state is not None
    return PooledReport(
        state=state,
        images={site: figures.images for site, figures in by_site.items()},
        figures=all_figures,
    )


def _pooled(by_site: Mapping[str, SiteScores | SubgroupFigures], names: Sequence[str]) -> list[PooledFigure]:
    found = {site: getattr(figures, "accuracy_interval", None) for site, figures in by_site.items()}
    pooled = [pooled_figure("accuracy", None, found)]
    for name in names:
        classes = {site: {one.name: one for one in figures.classes}.get(name) for site, figures in by_site.items()}
        pooled += [
            pooled_figure(key, name, {site: getattr(one, key) if one else None for site, one in classes.items()})
            for key in POOLED
        ]
    return pooled


def subgroup_of(figure: PooledFigure) -> str:
    """The images that a figure is of, as scanner=old; all."""
    return "all" if figure.column is None else f"{figure.column}={figure.value}"


def _known(figures: Sequence[PooledFigure]) -> list[PooledFigure]:
    """Those that two sites or more have. Raises CommandError if there are none."""
    known = [each for each in figures if each.pooled is not None]
    if not known:
        raise CommandError("no figure is known at two sites: give sites with images of the same class", Exit.BAD_INPUT)
    return known


def mean_cells(pooled: Pooled) -> list[str]:
    """A mean's columns in a table: sites, mean with interval, the next site's range, I²."""
    mean = Estimate(value=pooled.mean, low=pooled.low, high=pooled.high)
    ahead = "-" if pooled.prediction is None else "{:.1f} to {:.1f}".format(*(100 * end for end in pooled.prediction))
    return [str(pooled.sites), interval_text(mean), ahead, f"{100 * pooled.i2:.0f} %"]
