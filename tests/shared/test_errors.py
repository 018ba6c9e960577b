"""The library's errors: below the command nothing knows its lines and exit codes."""

from __future__ import annotations

import inspect
import pickle
import re
from pathlib import Path

import pytest

import promptfed
from promptfed.cli.app import CODES, exit_code
from promptfed.client_service.exits import ClientError
from promptfed.sdk import client
from promptfed.shared import errors
from promptfed.shared.data import DataError
from promptfed.shared.service.reasons import Exit
from promptfed.shared.spec.spec import SpecError

BELOW = ("sdk", "console", "runtime", "experiments", "export", "library", "testing")
KNOWS_EXITS = {"workers.py", "processes.py"}  # they look at how a client's process ended
KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.PromptfedError)]


def test_below_the_command_nothing_knows_its_error_and_its_exit_codes() -> None:
    root = Path(promptfed.__file__).parent
    modules = [path for folder in BELOW for path in (root / folder).rglob("*.py") if path.name not in KNOWS_EXITS]
    assert len(modules) > 35
    named = [path for path in modules if re.search(r"PromptfedError\(|\bExit\b", path.read_text())]
    assert named == []


def test_the_command_has_a_code_for_each_kind() -> None:
    assert set(CODES) == {kind for kind in KINDS if kind is not errors.PromptfedError}
    assert exit_code(DataError("a")) == exit_code(errors.BadInput("a")) == Exit.BAD_INPUT
    assert exit_code(ClientError(Exit.STATE, "a")) == Exit.STATE
    assert promptfed.PromptfedError is client.PromptfedError is promptfed.PromptfedError


@pytest.mark.parametrize(
    "error",
    [errors.NotAllowed("a", "wrong-role"), SpecError([{"path": "rounds", "detail": "a"}]), DataError("a", ["b"])],
)
def test_an_error_reaches_another_process_as_it_is(error: errors.PromptfedError) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), str(back), vars(back)) == (type(error), str(error), vars(error))
    assert type(back.saying("site a: b")) is (type(error) if type(error) in KINDS else errors.BadInput)
