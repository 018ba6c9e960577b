"""README, tutorials and guides are run as they stand: shell blocks by bash, Python blocks in this process.

A block of any page is run by a test or says why it is not; CONTRIBUTING has a test of its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from safetensors.torch import load_file

import promptfed
from promptfed.shared.data import open_source
from promptfed.shared.methods import METHODS
from promptfed.shared.methods.core.interface import Method
from tests import ROOT
from tests.docs.warm_commands import warm_commands
from tests.support import exports
from tests.support.own_images import write_folder
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE

DOCS = ROOT / "docs"
NOT_RUN = "<!-- not run: "  # before a block that needs a cluster, a GPU or a site of its own; the reason follows
SHELL = ("bash", "sh", "shell")
BLOCK = re.compile(r"(^ *<!-- [^\n]* -->\n)?^( *)```(\w*)[^\n]*\n(.*?)^\2```", re.DOTALL | re.MULTILINE)
COMMANDS = (
    r"promptfed|python3?|pip|make|pytest|curl|docker|kubectl|tar|pg_\w+|openssl|git|ssh-keygen|sha256sum|\.venv/\S+"
)
COMMAND = re.compile(rf"(?:\$ )?(?:{COMMANDS})(?: |$)")
# A failing line must end the script, and what it started must end with it.
GUARD = "set -euo pipefail\ntrap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT\n"


def blocks(page: Path, *languages: str) -> list[str]:
    """The blocks of a page that are run, in order."""
    return [
        dedent(block)
        for comment, _, language, block in BLOCK.findall(page.read_text())
        if language in languages and not comment.lstrip().startswith(NOT_RUN)
    ]


def nothing(folder: Path) -> None:
    """Most pages start in an empty folder."""


def write_run_file(folder: Path) -> None:
    """The run file that the page shows."""
    (block,) = re.findall(r"```yaml\n(name: .*?)```", (DOCS / "guides" / "deploy.md").read_text(), re.DOTALL)
    (folder / "styles.yaml").write_text(block)


def write_images(folder: Path) -> None:
    write_folder(folder / "images", each=6)
    shutil.copy(next((folder / "images").rglob("*.png")), folder / "photo.png")


PREPARED: dict[str, Callable[[Path], Any]] = {
    "../README.md": lambda folder: write_folder(folder / "images", each=6),
    "tutorials/your-own-images.md": lambda folder: write_folder(folder / "images", each=6),
    "guides/join-a-site.md": write_images,
    "guides/troubleshooting.md": write_images,
    "guides/deploy.md": write_run_file,
    "guides/site-policy.md": write_images,
}
COORDINATOR = """
promptfed coordinator --data-dir operator --port 8080 > coordinator.log 2>&1 &
until curl -sf http://127.0.0.1:8080/readyz > /dev/null; do sleep 0.2; done
export PROMPTFED_COORDINATOR=http://127.0.0.1:8080 PROMPTFED_OPERATOR_TOKEN=$(cat operator/operator.token)
"""
# What an operator has done before the page begins, in shell.
BEFORE = {
    "guides/backup.md": COORDINATOR.replace("operator --port", "data --port"),
    "guides/accounts.md": COORDINATOR
    + "echo '{name: pets, method: {name: promptfl}}' > pets.yaml\npromptfed federation create pets.yaml\n",
    "guides/join-a-site.md": COORDINATOR
    + """
cat > pets.yaml <<END
{name: pets, method: {name: promptfl}, backbone: {model: promptfed-tiny},
rounds: 2, participation: {min_clients: 1}, start: when_ready}
END
promptfed federation create pets.yaml
promptfed federation token pets --out pets.token
unset PROMPTFED_COORDINATOR PROMPTFED_OPERATOR_TOKEN
""",
}
# What others do before a block of a page, by the block's first line, in shell.
MEANWHILE = {
    "promptfed federation clients pets\n": """
promptfed federation token pets --uses 2 --out trial.token
for site in ward-3 ward-4; do
  promptfed client --coordinator $PROMPTFED_COORDINATOR --federation pets --yes \\
    --enrolment-token-file trial.token --name $site --state-dir $site \\
    --data "symbols:neon?only=sun,umbrella,cloud&per_class=2&test_per_class=2" > $site.log 2>&1 &
done
until [ "$(promptfed federation clients pets --json | grep -o '"active"' | wc -l)" = 2 ]; do sleep 0.5; done
"""
}
ALL = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
PAGES = [os.path.relpath(page, DOCS) for page in ALL if page.stem != "CONTRIBUTING" and blocks(page, *SHELL)]
PYTHON = {
    "README.md": "test_the_python_blocks_of_a_page_run_in_order",
    "docs/reference/api.md": "test_the_python_blocks_of_a_page_run_in_order",
    "docs/tutorials/your-own-method.md": "test_the_tutorials_method_passes_the_tutorials_test",
    "docs/tutorials/test-with-pytest.md": "tests/promptfed/testing/test_testing.py",
    "CONTRIBUTING.md": "tests/docs/test_contributing.py",
}  # the tests that run the Python blocks of a page


def meanwhile(block: str) -> str:
    """What others have done before ``block``."""
    return "".join(commands for line, commands in MEANWHILE.items() if block.startswith(line))


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for `PATH` with the command."""
    with warm_commands(tmp_path_factory.mktemp("bin")) as folder:
        yield folder


def run_page(name: str, folder: Path, commands: Path) -> str:
    """Run all shell blocks of a page as one script in ``folder``; what it printed."""
    PREPARED.get(name, nothing)(folder)
    script = BEFORE.get(name, "") + "".join(meanwhile(block) + block for block in blocks(DOCS / name, *SHELL))
    script = (
        script.replace("https://coordinator.example.org", "http://127.0.0.1:8080")
        .replace("8080", str(free_port()))
        .replace("/data/pets", str(folder / "images"))
    )
    script = re.sub(
        r"^(promptfed tune [^\n#]*?)(?: --seconds \d+)?( *(?:#.*)?)$", r"\1 --seconds 3\2", script, flags=re.M
    )
    environment = os.environ | {
        "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(folder),
        "XDG_STATE_HOME": str(folder / "state"), "XDG_CONFIG_HOME": str(folder / "config"),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-c", GUARD + script], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=3 * PATIENCE,
    )  # fmt: skip
    logs = "\n".join(f"== {log.name}\n{log.read_text()[-2000:]}" for log in sorted(folder.rglob("*.log")))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs}"
    return done.stdout


def hidden_commands(text: str) -> list[str]:
    """Commands in code blocks that are not marked as shell, so that nothing would run them."""
    return [
        line
        for _, _, language, block in BLOCK.findall(text)
        if language not in SHELL
        for line in dedent(block).splitlines()
        if COMMAND.match(line)
    ]


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.stem)
def test_every_command_of_a_page_is_in_a_shell_block(page: Path) -> None:
    assert hidden_commands(page.read_text()) == []


def test_every_python_block_has_a_test_or_says_why_not() -> None:
    assert {str(page.relative_to(ROOT)) for page in ALL if blocks(page, "python")} == set(PYTHON)
    assert all(name in globals() or (ROOT / name).is_file() for name in PYTHON.values())


@pytest.mark.parametrize("name", [name for name, test in PYTHON.items() if test.endswith("run_in_order")])
def test_the_python_blocks_of_a_page_run_in_order(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_images(tmp_path)
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {"__name__": "page"}
    for block in blocks(ROOT / name, "python"):
        exec(re.sub(r'"(symbols:\w+)"', r'"\1?topic=weather&per_class=4"', block), found)  # it draws fewer pictures
    assert 0 < found["result"].mean() <= 1
    assert f"{found['result'].mean()}" in capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in PAGES if not name.startswith("guides/")])
def test_the_shell_blocks_of_a_page_run_in_order(name: str, tmp_path: Path, commands: Path) -> None:
    expect_it_runs(name, tmp_path, commands)


def expect_it_runs(name: str, tmp_path: Path, commands: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("tests with curl: apt-get install curl")
    printed = run_page(name, tmp_path, commands)
    check = CHECKS.get(name)
    if check is not None:
        check(tmp_path, printed)


def the_prompts_are_there(folder: Path, printed: str) -> None:
    prompts = load_file(folder / "run" / "prompts.safetensors")
    assert set(prompts) == {"residual"}
    assert prompts["residual"].shape[0] == 3  # a row for each class
    assert {"painting", "quickdraw", "referee"} <= set(re.findall(r"painting|quickdraw|referee", printed))


def the_images_were_learned(folder: Path, printed: str) -> None:
    assert "zero-shot" in printed
    assert (folder / "tuned-result" / "prompts.safetensors").is_file()


def the_scores_have_means(folder: Path, printed: str) -> None:
    assert "Mean average precision on held-out training images" in printed
    assert all(f"AUROC of {name}" in printed for name in ("circle", "square", "triangle", "bar"))
    assert {each["value"] for each in json.loads((folder / "score-north" / "score.json").read_text())["subgroups"]} >= {
        "old",
        "new",
    }


CHECKS: dict[str, Callable[[Path, str], None]] = {
    "tutorials/first-federation.md": the_prompts_are_there,
    "tutorials/your-own-images.md": the_images_were_learned,
    "tutorials/several-labels.md": the_scores_have_means,
}


@pytest.fixture
def page() -> Iterator[dict[str, Any]]:
    """What the Python blocks of "Your own method" define; the method is forgotten afterwards."""
    written = blocks(DOCS / "tutorials" / "your-own-method.md", "python")
    assert len(written) == 3
    found: dict[str, Any] = {"__name__": "page"}
    for block in written:
        exec(block, found)
    yield found
    METHODS.pop("class_bias", None)


def test_the_tutorials_method_passes_the_tutorials_test(page: dict[str, Any]) -> None:
    page["test_a_step_is_that_of_the_gradient"]()
    assert METHODS["class_bias"] is page["ClassBias"]


def test_a_method_of_ones_own_runs_again_when_its_cell_does_and_classifies(page: dict[str, Any]) -> None:
    data = {"a": "symbols:neon?topic=weather&per_class=2&test_per_class=2"}
    names = list(open_source(data["a"]).class_names)
    method = page["ClassBias"](page["ClassBias"].Hyper())
    result = promptfed.run(method, data, rounds=1, class_names=names, backbone=exports.backbone())
    assert result.spec["method"]["name"] == "class_bias"
    assert set(result.state) == {"bias"}
    assert 0 <= (result.mean() or 0.0) <= 1


def test_a_method_that_is_none_or_named_as_another_is_refused(page: dict[str, Any]) -> None:
    class Nameless(page["ClassBias"]):  # type: ignore[name-defined]
        name = "promptfl"

    class Incomplete(Method):
        name = "incomplete"

    for kind, says in (
        (Nameless, "there is a method 'promptfl' already"),
        (Incomplete, "does not define"),
        (int, "method=<class 'int'> is not str"),
    ):
        with pytest.raises(promptfed.PromptfedError, match=says):
            promptfed.run(kind, ["digits"])
    assert METHODS["promptfl"].__module__.endswith("promptfl")
    assert "incomplete" not in METHODS


@pytest.mark.skipif(find_spec("elpv_dataset") is None, reason="promptfed[photos] is not installed")
def test_the_tutorial_s_photographs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (DOCS / "tutorials" / "your-own-images.md").read_text()
    (code,) = re.findall(r"^python - <<END\n(.*?)^END\n", page, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "your-own-images.md", "exec"), {})
    source = open_source(f"folder:{tmp_path / 'images'}")
    assert source.class_names == ("defective", "functional")
    assert len(source.train) + len(source.test) == 300
