"""promptfed: federated prompt learning for frozen CLIP-like models, as services, a command and a library.

The library in short:

    import promptfed

    result = promptfed.run("fedpgp", {"a": "symbols:neon", "b": "symbols:quickdraw"}, rounds=5)
    result.mean(), result.predict("image.png", class_names=["sun", "anchor"])

`run` has a federation in this process, `connect` steers one at a coordinator; both come to a `Result`. The names are
imported when they are first used, since the command must start without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from promptfed.api import CommandError
    from promptfed.experiments.simulated import Accuracy
    from promptfed.remote import Connection, Federation, connect
    from promptfed.results import Prediction, Result
    from promptfed.running import run

_WHERE = {
    "Accuracy": "promptfed.experiments.simulated",
    "CommandError": "promptfed.api",
    "Connection": "promptfed.remote",
    "Federation": "promptfed.remote",
    "Prediction": "promptfed.results",
    "Result": "promptfed.results",
    "connect": "promptfed.remote",
    "run": "promptfed.running",
}

__all__ = ["Accuracy", "CommandError", "Connection", "Federation", "Prediction", "Result", "connect", "run"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
