"""A child process that reads medical files, or images for a backbone. Requests and answers are lines of JSON.

A request is ``{"do": "facts", "check", "pixels" or "cut", "path", "place", "settings"}``. An answer is ``{"facts"}``,
``{"mode", "size", "digest"}``, ``{"mode", "size", "bytes"}`` or ``{"bytes"}``, which so many bytes of pixels follow, or
``{"error"}``. Files are hostile until they are read: memory is bounded here, time by the parent. Errors are our own
words, since those of libraries can have values of headers.
"""

from __future__ import annotations

import json
import logging
import os
import select
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from PIL import Image

from promptfed.shared import get_extra, machine
from promptfed.shared.data.errors import Unreadable
from promptfed.shared.data.image_files import LARGE, Cut, image_digest, read_image, shrunk
from promptfed.shared.data.pixels import Scale

MEMORY = 3 << 30  # bytes of address space
IDLE_SECONDS = 30.0  # without a request, after which the process ends; the parent starts another when it needs one


def answer(request: dict[str, Any]) -> tuple[dict[str, Any], Sequence[bytes | memoryview]]:
    """The answer to a request, and the pixels that follow it."""
    try:
        path, settings = Path(request["path"]), request["settings"]
        if request["do"] == "cut":
            cut, known = Cut(**settings["cut"]), (settings[name] for name in ("paths", "digests", "greys"))
            images = [cut.pixels(_known(*file)).data.cast("B") for file in zip(*known, strict=True)]
            return {"bytes": sum(map(len, images))}, images
        from promptfed.shared.data.medical import dicom

        if request["do"] == "facts":
            return {"facts": dicom.facts(path)}, ()
        image = Image.fromarray(dicom.pixels(path, request["place"], settings))
        if image.width * image.height > LARGE:
            image = shrunk(image)
        about = {"mode": image.mode, "size": image.size}
        if request["do"] == "check":
            return {**about, "digest": image_digest(image.convert("RGB"))}, ()
        body = image.tobytes()
        return {**about, "bytes": len(body)}, (body,)
    except Unreadable as error:
        return {"error": str(error)}, ()
    except ImportError:
        return {"error": f"its reader is not installed; {get_extra('medical')}"}, ()
    except MemoryError:
        return {"error": f"it needs more than {MEMORY >> 30} GB of memory"}, ()
    except RecursionError:
        return {"error": "its sequences are nested too deeply"}, ()
    except FileNotFoundError:
        return {"error": "it is gone"}, ()
    except OSError:
        return {"error": "it cannot be opened, or is not an ordinary file"}, ()
    except Exception:  # a library's own kinds, on files that are not as they should be
        return {"error": "its content cannot be read; the file is damaged"}, ()


def _known(path: str, digest: str, grey: Scale | None) -> Image.Image:
    """The image of ``digest``. Raises Unreadable if the file has another one: this process cannot tell its name."""
    image = read_image(Path(path), grey)
    if image_digest(image) != digest:
        raise Unreadable("a file is not what it was when the data were opened")
    return image


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer until the parent is gone, or asks nothing for a while."""
    while not hasattr(select, "poll") or select.select([requests], [], [], IDLE_SECONDS)[0]:
        line = requests.readline()
        if not line:
            return
        told, body = answer(json.loads(line))
        answers.write(json.dumps(told).encode() + b"\n")
        for part in body:
            answers.write(part)
        answers.flush()


def main() -> None:
    """Run the child. What libraries write on standard output or log is dropped: it can have values of headers."""
    answers = os.fdopen(os.dup(1), "wb")
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    warnings.simplefilter("ignore")
    logging.disable()
    machine.limit_memory(MEMORY)
    with open(0, "rb", buffering=0) as requests:
        serve(requests, answers)


if __name__ == "__main__":
    main()
