"""promptfed: federated prompt learning for frozen CLIP-like models, as services, a command and a library.

The library in short:

    import promptfed

    result = promptfed.run("fedpgp", {"a": "symbols:neon", "b": "symbols:quickdraw"}, rounds=5)
    result.mean(), result.predict("image.png", class_names=["sun", "anchor"])

`run` has a federation in this process, `connect` steers one at a coordinator; both return a `Result`.
`verify_export` checks a folder that `Result.export` wrote against the coordinator's key. The names are imported when
they are first used, since the command must start without torch.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from promptfed.export.verification import Verification, verify_export
    from promptfed.library.result import Prediction, Result
    from promptfed.library.run import Connection, Federation, connect, run
    from promptfed.sdk.result import Accuracy
    from promptfed.shared.clip import load_backbone
    from promptfed.shared.errors import CommandError, PromptfedError

# A checkout without symbolic links (a zip archive, Windows) has text files instead of the links beside this file. There
# the three folders are found in the root of the repository.
_HERE = Path(__file__).resolve().parent
if not (_HERE / "shared").is_dir() and (_HERE.parent / "shared" / "__init__.py").is_file():
    __path__.append(str(_HERE.parent))

_WHERE = {
    "Accuracy": "promptfed.sdk.result",
    "CommandError": "promptfed.shared.errors",
    "Connection": "promptfed.library.run",
    "Federation": "promptfed.library.run",
    "Prediction": "promptfed.library.result",
    "PromptfedError": "promptfed.shared.errors",
    "Result": "promptfed.library.result",
    "Verification": "promptfed.export.verification",
    "connect": "promptfed.library.run",
    "load_backbone": "promptfed.shared.clip",
    "run": "promptfed.library.run",
    "__version__": "promptfed.shared",
    "verify_export": "promptfed.export.verification",
}

__all__ = [
    "Accuracy",
    "CommandError",
    "Connection",
    "Federation",
    "Prediction",
    "PromptfedError",
    "Result",
    "Verification",
    "connect",
    "load_backbone",
    "run",
    "verify_export",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
