"""The GPUs that a launch assigns to its clients."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable

from promptfed.sdk.errors import CommandError, Exit

QUERY = ("--query-gpu=uuid", "--format=csv,noheader")


def choose_gpus(asked: str, find: Callable[[], list[str]]) -> list[str]:
    """The GPUs to use. ``auto``: all that ``find`` returns; ``none``: no GPU; a number: that many of them.

    Raises:
        CommandError: there are fewer GPUs, or ``asked`` has another form.
    """
    if asked == "none":
        return []
    if asked != "auto" and not (asked.isdecimal() and int(asked) > 0):
        raise CommandError(f"--gpus {asked} is not known: use auto, none or a number", Exit.BAD_INPUT)
    gpus = find()
    if asked == "auto":
        return gpus
    if int(asked) > len(gpus):
        text = f"--gpus {asked} asks for more GPUs than there are ({len(gpus)}): use auto, none or a smaller number"
        raise CommandError(text, Exit.BAD_INPUT)
    return gpus[: int(asked)]


def gpus_of_torch() -> list[str]:
    """The GPUs by torch's device names: ``cuda:0`` and so on."""
    import torch

    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


def gpus_of_engine() -> list[str]:
    """Ids with which a container can be given a GPU of this machine."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        answer = subprocess.run([tool, *QUERY], capture_output=True, text=True, timeout=30, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return []  # the tool is installed without a driver
    return answer.stdout.split()
