"""Methods that other packages bring: what is loaded when, and what is said of those that cannot be used."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent

import pytest

from promptfed.shared import methods
from promptfed.shared.methods import METHODS, method_class
from promptfed.shared.methods.core.registry import MethodRegistry, UnusableMethod
from promptfed.shared.methods.promptfl import PromptFL
from promptfed.shared.spec.spec import SpecError

SOUND = """
from promptfed.shared.methods.promptfl import PromptFL

class Mine(PromptFL):
    name = "mine"
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a package with one module and its entry points where Python looks for packages."""
    monkeypatch.syspath_prepend(tmp_path)

    def put(package: str, text: str, **entries: str) -> None:
        module = package.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(text)
        about = tmp_path / f"{module}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        points = [f"{name} = {module}:{value}" for name, value in entries.items()]
        (about / "entry_points.txt").write_text("\n".join(["[promptfed.methods]", *points]))

    return put


@pytest.fixture
def registry() -> MethodRegistry:
    return MethodRegistry({"promptfl": PromptFL})


def why(registry: MethodRegistry, name: str) -> str:
    with pytest.raises(UnusableMethod) as raised:
        registry[name]
    return str(raised.value)


def test_a_method_of_a_package_is_one_of_the_methods(install: Install, registry: MethodRegistry) -> None:
    install("sound-1", SOUND, mine="Mine")
    assert set(registry) == {"promptfl", "mine"}
    assert registry["mine"].name == "mine"
    assert registry.package("mine") == "sound-1==1.0"
    assert registry.package("promptfl") is None


def test_our_own_are_told_from_those_of_packages(install: Install, registry: MethodRegistry, tmp_path: Path) -> None:
    mark = tmp_path / "imported"
    install("apart", f"open({str(mark)!r}, 'w').close()\n" + SOUND, mine="Mine")
    registry["put_here"] = PromptFL
    assert registry.own() == ["promptfl", "put_here"]
    assert not mark.exists()
    assert set(registry) == {"promptfl", "put_here", "mine"}
    assert registry.own() == ["promptfl", "put_here"]


def test_threads_that_ask_at_once_import_it_once_and_know_its_package(
    install: Install, registry: MethodRegistry
) -> None:
    text = SOUND.replace("class Mine", "import time\n\nIMPORTS = []\nIMPORTS.append(1)\ntime.sleep(0.2)\n\nclass Mine")
    install("sound-2", text, mine="Mine")
    with ThreadPoolExecutor(4) as pool:
        packages = list(pool.map(lambda _: (registry["mine"], registry.package("mine"))[1], range(4)))
    assert packages == ["sound-2==1.0"] * 4


def test_a_package_is_imported_only_when_its_method_is_asked_for(
    install: Install, registry: MethodRegistry, tmp_path: Path
) -> None:
    mark = tmp_path / "imported"
    install("marks", f"open({str(mark)!r}, 'w').close()\n" + SOUND, mine="Mine")
    assert registry["promptfl"] is PromptFL
    assert registry.get("unknown") is None
    assert not mark.exists()
    assert registry["mine"].name == "mine"
    assert mark.exists()


@pytest.mark.parametrize(
    ("text", "value", "said"),
    [
        ("import not_installed_anywhere", "Mine", "importing {module}:Mine fails (ModuleNotFoundError: No module"),
        ("raise SystemExit(3)", "Mine", "importing {module}:Mine fails (SystemExit: 3)"),
        (SOUND, "Yours", "importing {module}:Yours fails (AttributeError:"),
        ("Mine = 3", "Mine", "{module}:Mine is not a subclass of promptfed.shared.methods.core.interface.Method"),
        (
            "from promptfed.shared.methods.core.interface import Method\nclass Mine(Method): name = 'mine'",
            "Mine",
            "{module}:Mine does not define classifier, dims, state_tensors, train",
        ),
        (SOUND.replace('"mine"', '"other"'), "Mine", "{module}:Mine calls itself 'other': name it and its entry"),
        (SOUND + "    def phases(self, round): return ()", "Mine", "cannot be described (TypeError: "),
    ],
)
def test_what_cannot_be_used_is_named_with_its_package(
    install: Install, registry: MethodRegistry, text: str, value: str, said: str, tmp_path: Path
) -> None:
    package = tmp_path.name.replace("_", "-")
    install(package, text, mine=value)
    told = why(registry, "mine")
    assert told.startswith(f"the method 'mine' of {package}==1.0 cannot be used: ")
    assert said.format(module=package.replace("-", "_")) in told
    assert "mine" not in registry


def test_two_packages_with_one_name_are_refused_and_both_named(install: Install, registry: MethodRegistry) -> None:
    for package in ("first-one", "second-one"):
        install(package, SOUND, mine="Mine")
    told = why(registry, "mine")
    assert "first-one==1.0" in told
    assert "second-one==1.0" in told
    assert told.endswith("more than one package brings it: uninstall all but one")


def test_a_package_does_not_replace_a_method_of_ours(
    install: Install, registry: MethodRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    install("usurper", SOUND.replace('"mine"', '"promptfl"'), promptfl="Mine")
    with caplog.at_level(logging.WARNING):
        assert list(registry) == ["promptfl"]
    assert registry["promptfl"] is PromptFL
    assert "the method 'promptfl' of usurper==1.0 is not used" in caplog.text


def test_lists_leave_out_what_cannot_be_used_and_say_so_once(
    install: Install, registry: MethodRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    install("failing", "raise ValueError('half written')", broken="Mine")
    install("working", SOUND, mine="Mine")
    with caplog.at_level(logging.WARNING):
        assert set(registry) == set(registry) == {"promptfl", "mine"}
        assert len(registry) == 2
    assert caplog.text.count("half written") == 1


def test_a_spec_that_asks_for_it_is_refused_at_the_methods_name(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("unfinished", "raise ValueError('half written')", broken="Mine")
    monkeypatch.setattr(methods, "METHODS", MethodRegistry({"promptfl": PromptFL}))
    with pytest.raises(SpecError, match="half written") as refused:
        method_class("broken")
    assert [error["path"] for error in refused.value.errors] == ["method.name"]
    with pytest.raises(SpecError, match="there is no method 'broke'; `promptfed methods`"):
        method_class("broke")


def test_tests_can_put_a_method_among_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setitem(METHODS, "mine", PromptFL)
        assert method_class("mine") is PromptFL
    assert "mine" not in METHODS


def test_a_file_in_the_folder_is_a_method_as_contributing_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[3] / "CONTRIBUTING.md").read_text()
    start = text.index("```python\n", text.index("## Add a method")) + len("```python\n")
    (tmp_path / "promptfl_sparse.py").write_text(dedent("   " + text[start : text.index("   ```", start)].lstrip(" ")))
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path)])
    own = MethodRegistry(methods._own_methods())
    assert set(own) == {*METHODS.own(), "promptfl_sparse"}
    assert all(kind.name == name for name, kind in own.items())
    assert own["promptfl_sparse"](own["promptfl_sparse"].Hyper(weight=0.5)).hyper.model_dump()["weight"] == 0.5
