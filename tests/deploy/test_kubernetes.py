"""The manifests of ``deploy/kubernetes``: valid for the API, built by Kustomize, with options that there are."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from promptfed.client_service.settings import Settings as ClientSettings
from promptfed.coordinator.settings import Settings
from promptfed.shared.service.command_line import given_settings
from tests import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"
VERSIONS = ("1.30", "1.33")
OF_KUSTOMIZE = "kustomization.yaml"


def manifests() -> list[Path]:
    return sorted(path for path in FOLDER.glob("*/*.yaml") if path.name != OF_KUSTOMIZE)


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


def selected(document: dict[str, Any]) -> dict[str, Any]:
    """As Kustomize makes it: with the labels by which its pods are found."""
    if document["kind"] in ("Deployment", "StatefulSet"):
        labels = {"app.kubernetes.io/name": "promptfed"}
        document["spec"]["selector"] = {"matchLabels": labels}
        document["spec"]["template"]["metadata"] = {"labels": labels}
    return document


@pytest.mark.slow
@pytest.mark.parametrize("path", manifests(), ids=lambda path: f"{path.parent.name}-{path.stem}")
@pytest.mark.parametrize("version", VERSIONS)
def test_it_is_valid_for_the_api(path: Path, version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="manifests: pip install kubernetes-validate")
    validate.validate(selected(read(path)), version, strict=True)


@pytest.mark.slow
def test_a_wrong_manifest_is_found() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="manifests: pip install kubernetes-validate")
    wrong = selected(read(FOLDER / "coordinator" / "deployment.yaml"))
    wrong["spec"]["replica"] = wrong["spec"].pop("replicas")
    with pytest.raises(validate.ValidationError):
        validate.validate(wrong, VERSIONS[-1], strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["coordinator", "client"])
def test_kustomize_builds_it_and_everything_finds_its_pods(part: str) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("manifests by Kustomize: install kubectl")
    done = subprocess.run(["kubectl", "kustomize", str(FOLDER / part)], capture_output=True, text=True)
    if "dispatcher" in done.stderr or "unknown command" in done.stderr:
        pytest.skip("manifests by Kustomize: install kubectl")
    assert done.returncode == 0, done.stderr
    built = list(yaml.safe_load_all(done.stdout))
    validate = pytest.importorskip("kubernetes_validate", reason="manifests: pip install kubernetes-validate")
    kinds = {}
    for document in built:
        validate.validate(document, VERSIONS[-1], strict=True)
        kinds[document["kind"]] = document
    work = kinds.get("Deployment") or kinds["StatefulSet"]
    labels = work["spec"]["template"]["metadata"]["labels"]
    assert kinds["Service"]["spec"]["selector"].items() <= labels.items()
    assert kinds["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    if part == "coordinator":
        assert kinds["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_the_coordinators_options_are_ones_that_it_has() -> None:
    container = read(FOLDER / "coordinator" / "deployment.yaml")["spec"]["template"]["spec"]["containers"][0]
    known = given_settings(Settings, "coordinator", container["args"])
    assert {"advertise_url", "database_url_file", "store", "operator_token_file", "signing_key_file"} <= set(known)
    named = {one["name"] for one in container["env"]}
    assert named == {"POD_IP", "STORE"}
    assert {probe for probe in container if probe.endswith("Probe")} == {
        "startupProbe", "readinessProbe", "livenessProbe"
    }  # fmt: skip
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_the_clients_variables_are_ones_that_it_has() -> None:
    literals = read(FOLDER / "client" / OF_KUSTOMIZE)["configMapGenerator"][0]["literals"]
    names = {literal.partition("=")[0].removeprefix("PROMPTFED_CLIENT_").lower() for literal in literals}
    assert names <= set(ClientSettings.model_fields)
    spec = read(FOLDER / "client" / "statefulset.yaml")["spec"]
    assert spec["replicas"] == 1, "a client's private state is its own"
    assert spec["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
