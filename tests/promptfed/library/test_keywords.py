"""Every keyword of the public Python API, by the signatures: with a value of its own, and with one of a wrong type."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

import promptfed
from promptfed.shared.clip import Backbone
from promptfed.testing import LocalCoordinator, OperatorCalls, ScriptedClient, drive, local_coordinator
from promptfed.testing.plugin import Enrol, TinyFederation
from tests.support.coordinators import in_thread

pytest_plugins = ["promptfed.testing.plugin"]
SMALL = "?topic=weather&per_class=2&test_per_class=2"
DATA = {"a": f"symbols:neon{SMALL}"}
FUNCTIONS = [promptfed.run, promptfed.connect, promptfed.verify_export, drive, local_coordinator]
CLASSES = [promptfed.Connection, promptfed.Federation, promptfed.Result, OperatorCalls, ScriptedClient]
PUBLIC = FUNCTIONS + [
    member for kind in CLASSES for name, member in vars(kind).items()
    if inspect.isfunction(member) and not name.startswith("_")
]  # fmt: skip
VALID: dict[str, Any] = {"data": ["digits"], "task": {}, "clients": [], "body": b""}
VALID["client"] = ScriptedClient(httpx.Client(), "f", "a")  # of what is needed and is no text
OPEN = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def keywords(function: Callable[..., Any]) -> list[str]:
    kinds = inspect.signature(function).parameters.values()
    return [each.name for each in kinds if each.name != "self" and each.annotation != "Any" and each.kind not in OPEN]


ALL = [(function, name) for function in PUBLIC for name in keywords(function)]


@pytest.fixture(scope="module")
def result(backbone: Backbone) -> promptfed.Result:
    return promptfed.run("promptfl", DATA, rounds=1, backbone=backbone)


@pytest.mark.parametrize(("function", "name"), ALL, ids=lambda value: getattr(value, "__qualname__", value))
def test_a_value_of_a_wrong_type_is_refused_by_its_name(function: Callable[..., Any], name: str) -> None:
    """Python binds the others first; what they are does not matter to the one that is looked at."""
    parameters = inspect.signature(function).parameters
    first = {"self": "self"} if "self" in parameters else {}
    needed = [each.name for each in parameters.values() if each.default is each.empty and each.kind not in OPEN]
    others = {each: VALID.get(each, "x") for each in needed if each != "self"}
    with pytest.raises(promptfed.PromptfedError, match=f"{name}=<object object at .*> is not "):
        function(**first, **others | {name: object()})


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("data=None is not", {"data": None}), ("data=.*Path.* is not", {"data": [Path()]}),
    ("data='symbols:neon' is a text: give a list", {"data": "symbols:neon"}), ("pool='2' is not int", {"pool": "2"}),
    ("pool=0 is not int", {"pool": 0}), ("pool=True is not int", {"pool": True}), ("meta", {"device": "meta"}),
    ("nothing", {"device": "nothing"}), ("backbone=7 is not", {"backbone": 7}),
    ("backbone.modle", {"backbone": {"modle": "RN50"}}), ("no-such", {"backbone": "no-such"}),
    ("leave backbone_file out", {"backbone": "loaded", "backbone_file": "x"}),
    ("on cpu already", {"backbone": "loaded", "device": "cuda"}), ("rounds", {"rounds": "five"}),
    ("unexpected|shuots", {"shuots": 1}), ("domains=.* is not", {"domains": ["a neon"]}),
    ("method=7 is not", {"method": 7}),
]  # fmt: skip


@pytest.mark.parametrize(("says", "given"), WRONG, ids=lambda value: str(value)[:30])
def test_a_run_s_wrong_argument_is_an_error_of_our_own(says: str, given: dict[str, Any], backbone: Backbone) -> None:
    given = given | ({"backbone": backbone} if given.get("backbone") == "loaded" else {})
    with pytest.raises(promptfed.PromptfedError, match=says):
        promptfed.run(**{"method": "promptfl", "data": DATA, "rounds": 1} | given)


def test_wrong_calls_of_a_result_are_errors_of_our_own(result: promptfed.Result, tmp_path: Path) -> None:
    for wrong in (
        lambda: result.predict(np.zeros((8, 8, 3))),
        lambda: result.predict(Image.new("RGB", (8, 8)), class_names=[7]),  # type: ignore[list-item]
        lambda: result.predict(Image.new("RGB", (8, 8)), "sun"),
        lambda: result.class_weights("sun"),
        lambda: result.export(tmp_path / "e", class_names="sun"),
        lambda: result.accuracies("1"),
        lambda: result.track(7),
        lambda: promptfed.connect(7),
        lambda: promptfed.connect("", token="x"),
        lambda: promptfed.connect(token=""),
        lambda: promptfed.verify_export(7, None),
        lambda: promptfed.verify_export(tmp_path),
    ):
        with pytest.raises(promptfed.PromptfedError):
            wrong()


def test_calls_after_the_end_of_a_connection_are_told(tmp_path: Path) -> None:
    with in_thread(tmp_path / "data") as coordinator:
        token = (tmp_path / "data" / "operator.token").read_text().strip()
        with promptfed.connect(coordinator.url, token=token) as connection:
            federation = connection.create("promptfl", "styles", rounds=1)
            with pytest.raises(promptfed.PromptfedError, match="seconds='1' is not"):
                federation.wait("1")
    for late in (connection.federations, federation.status, federation.result, federation.start):
        with pytest.raises(promptfed.PromptfedError, match="is closed: connect again"):
            late()


@pytest.mark.parametrize("given", ["name", "mapping", "loaded"])
def test_a_backbone_is_a_name_a_mapping_or_a_loaded_one_whose_is_the_spec_s(given: str) -> None:
    model = {
        "name": "promptfed-emoji",
        "mapping": {"model": "promptfed-emoji", "pretrained": "embedded"},
        "loaded": promptfed.load_backbone("promptfed-emoji", "random"),
    }[given]
    result = promptfed.run("zero_shot", DATA, rounds=1, backbone=model)
    assert result.spec["backbone"]["model"] == "promptfed-emoji"
    assert result.spec["backbone"]["pretrained"] == ("random" if given == "loaded" else "embedded")


def test_every_keyword_of_a_run_has_its_effect(backbone: Backbone, tmp_path: Path, capsys: Any) -> None:
    given: dict[str, Any] = {
        "method": {"name": "promptfl", "m": 2}, "data": [f"symbols:neon{SMALL}", f"symbols:sketch{SMALL}"],
        "unseen": {"referee": f"symbols:painting{SMALL}"}, "tests": {"further": f"symbols:quickdraw{SMALL}"},
        "domains": {"client-0": "a neon sign of a {}"}, "backbone": backbone, "folder": tmp_path / "run", "pool": 2,
        "allow_backbone": True, "progress": True,
    }  # fmt: skip
    assert set(keywords(promptfed.run)) - set(given) == {
        "device",
        "backbone_file",
    }  # what needs a GPU, or a file of weights
    result = promptfed.run(**given, rounds=1)
    assert (result.spec["method"]["m"], result.spec["rounds"]) == (2, 1)
    assert {row.client for row in result.accuracies()} == {"client-0", "client-1", "referee"}
    assert {row.split for row in result.accuracies()} == {"test", "further"}
    assert (tmp_path / "run").is_dir()
    assert "1/1" in capsys.readouterr().err


def test_the_fixtures_refuse_what_the_real_thing_refuses(
    enrolled: Enrol, tiny_federation: TinyFederation, tmp_path: Path
) -> None:
    with pytest.raises(promptfed.PromptfedError, match="pool="):
        tiny_federation("promptfl", pool="2")
    with pytest.raises(promptfed.PromptfedError, match="is not str"):
        enrolled(7)
    with pytest.raises(promptfed.PromptfedError, match="port"):
        LocalCoordinator(tmp_path / "data", port="none")
    with local_coordinator(str(tmp_path / "data")) as coordinator:
        assert coordinator.get("/healthz") == {"status": "ok"}
        federation = coordinator.create()
        with pytest.raises(AssertionError, match="uses"):
            coordinator.token(federation, uses=2, client="a")
