"""Renders SVGs in a separate process, since a few SVGs make the renderer abort, which must not end the build.

``python -m promptfed.shared.data.emoji.render`` reads one JSON string per line and answers each with one line: the PNG
in base64, or ``!`` and the reason why it could not be drawn.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import subprocess
import sys
from types import TracebackType

from PIL import Image

from promptfed.shared.data.emoji.styles import SIZE
from promptfed.shared.data.source import DataError

_DRAWN_AT = 4 * SIZE  # scaled down afterwards, so that all renderers draw thin lines alike
RENDERER = "resvg_py"


class SvgRenderer:
    """A renderer that restarts after a picture that aborts it."""

    def __init__(self) -> None:
        if importlib.util.find_spec(RENDERER) is None:
            raise DataError("drawing SVG needs the package resvg-py: pip install 'promptfed[emoji]'.")
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> SvgRenderer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def draw(self, svg: str) -> Image.Image | None:
        """The picture (SIZE, SIZE) RGBA; None if the renderer cannot draw it or aborts."""
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-m", __spec__.name]
            self._process = subprocess.Popen(  # noqa: S603  this module, run by this interpreter
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(svg) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:  # it aborted: only this picture is lost
            self._process.wait()
            return None
        if line.startswith("!"):
            return None
        with Image.open(io.BytesIO(base64.b64decode(line))) as image:
            return image.convert("RGBA")


def serve() -> None:
    """Answer each line of standard input."""
    import resvg_py

    for line in sys.stdin:
        try:
            png = bytes(resvg_py.svg_to_bytes(svg_string=json.loads(line), width=_DRAWN_AT, height=_DRAWN_AT))
            out = io.BytesIO()
            fitted(Image.open(io.BytesIO(png))).save(out, "PNG")
            answer = base64.b64encode(out.getvalue()).decode()
        except Exception as error:
            answer = "!" + " ".join(str(error).split())
        print(answer, flush=True)


def fitted(image: Image.Image) -> Image.Image:
    """The RGBA picture, scaled down to fit SIZE x SIZE and centred."""
    image = image.convert("RGBA")
    scale = SIZE / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    small = image.resize(size, Image.Resampling.LANCZOS)
    whole = Image.new("RGBA", (SIZE, SIZE), (255, 255, 255, 0))
    whole.paste(small, ((SIZE - size[0]) // 2, (SIZE - size[1]) // 2))
    return whole


if __name__ == "__main__":
    serve()
