"""The example notebook is executed as it stands."""

from __future__ import annotations

import sys
from pathlib import Path

import nbclient
import nbformat
import pytest
from traitlets.config import Config

from tests import ROOT
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE

NOTEBOOK = ROOT / "examples" / "federation.ipynb"


def test_the_example_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    kernels = tmp_path / "jupyter" / "kernels" / "python3"
    kernels.mkdir(parents=True)
    command = f'["{sys.executable}", "-m", "ipykernel_launcher", "-f", "{{connection_file}}"]'
    (kernels / "kernel.json").write_text(f'{{"argv": {command}, "display_name": "here", "language": "python"}}')
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    # told its ports: those that jupyter picks are anybody's until the kernel has started
    ports = {f"{channel}_port": free_port() for channel in ("shell", "iopub", "stdin", "control", "hb")}
    patience = {"timeout": int(PATIENCE), "startup_timeout": int(PATIENCE)}
    config = Config(KernelManager={"cache_ports": False, **ports}, NotebookClient=patience)
    nbclient.NotebookClient(notebook, config=config, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = "".join(output.get("text", "") for output in outputs)
    tables = [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert len(tables) == 1
    assert all(name in tables[0] for name in ("signmaker", "doodler", "sketchbook"))
    assert "['card.json', 'card.md', 'class_weights.safetensors', 'prompts.safetensors']" in shown.replace(
        "'backbone', ", ""
    )
    assert "adapted" in shown
    assert (tmp_path / "styles-export" / "card.md").exists()


def test_the_stored_outputs_name_no_machine() -> None:
    text = NOTEBOOK.read_text()
    assert "/home/" not in text
    assert str(ROOT) not in text
