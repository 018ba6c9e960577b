"""What carries out a bench's federations: this process, or with `--engine ray` a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from promptfed.experiments.bench.runner import Runner
from promptfed.experiments.cluster.cells import RayRunner, connected_later
from promptfed.sdk.errors import CommandError, Exit

OPTIONS = frozenset({"engine", "address", "gpus_per_cell"})


@contextmanager
def runner_for(options: Mapping[str, Any], out: Path, given: Set[str]) -> Iterator[Runner]:
    """The runner that the ``options`` of the command line, of which ``given`` were written, ask for.

    Raises:
        CommandError: options of an engine that is not asked for.
    """
    common = (out, options["pool"], options["device"], options["allow_backbone"])
    if options["engine"] is None:
        unused = sorted(given & OPTIONS)
        if unused:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
            raise CommandError(f"{names}: for --engine ray; add it, or leave them out", Exit.BAD_INPUT)
        yield Runner(*common)
        return
    with connected_later(options["address"]) as cluster:
        yield RayRunner(*common, cluster=cluster, gpus_per_cell=options["gpus_per_cell"])
