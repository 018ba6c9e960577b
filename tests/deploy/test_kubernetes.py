"""The manifests of ``deploy/kubernetes``: valid for the API, built by Kustomize, with options that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from promptfed.client_service.monitor import Monitor, Status
from promptfed.client_service.settings import Settings as ClientSettings
from promptfed.coordinator import problems
from promptfed.coordinator.engine.metrics import ALERTING, Metrics
from promptfed.coordinator.settings import Settings
from promptfed.shared.service.process import given_settings
from tests import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"

VERSIONS = ("1.30", "1.33")

OF_KUSTOMIZE = "kustomization.yaml"


def manifests() -> list[Path]:
    return sorted(path for path in FOLDER.glob("*/*.yaml") if path.name not in (OF_KUSTOMIZE, "patch.yaml"))


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
@pytest.mark.parametrize("part", ["coordinator", "waiting", "client"])
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


def patched(document: dict[str, Any], patches: list[dict[str, Any]]) -> dict[str, Any]:
    """As Kustomize applies a JSON patch (RFC 6902) of ``add`` and ``replace``."""
    for patch in patches:
        *way, last = patch["path"].split("/")[1:]
        place: Any = document
        for part in way:
            place = place[int(part) if isinstance(place, list) else part]
        if last == "-":
            place.append(patch["value"])
        else:
            assert (last in place) == (patch["op"] == "replace")
            place[last] = patch["value"]
    return document


def test_the_coordinators_options_are_ones_that_it_has() -> None:
    deployment = read(FOLDER / "coordinator" / "deployment.yaml")
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    known = given_settings(Settings, "coordinator", container["args"])
    assert {"database_url_file", "store", "operator_token_file", "signing_key_file"} <= set(known)
    assert "advertise_url" not in known
    assert (deployment["spec"]["replicas"], deployment["spec"]["strategy"]["type"]) == (1, "Recreate")
    assert {probe for probe in container if probe.endswith("Probe")} == {
        "startupProbe", "readinessProbe", "livenessProbe"
    }  # fmt: skip
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_coordinators_that_wait_for_each_other_let_rollouts_and_drains_end() -> None:
    patches = yaml.safe_load((FOLDER / "waiting" / "patch.yaml").read_text())
    deployment = patched(read(FOLDER / "coordinator" / "deployment.yaml"), patches)
    validate = pytest.importorskip("kubernetes_validate", reason="manifests: pip install kubernetes-validate")
    validate.validate(selected(deployment), VERSIONS[-1], strict=True)
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    assert "advertise_url" in given_settings(Settings, "coordinator", container["args"])
    assert {one["name"] for one in container["env"]} == {"POD_IP", "STORE"}
    probes = {container[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert probes == {"/healthz"}
    assert deployment["spec"]["replicas"] > 1
    assert not list(FOLDER.glob("*/disruption.yaml")), "of those that wait none is needed"


def test_the_clients_variables_are_ones_that_it_has() -> None:
    literals = read(FOLDER / "client" / OF_KUSTOMIZE)["configMapGenerator"][0]["literals"]
    names = {literal.partition("=")[0].removeprefix("PROMPTFED_CLIENT_").lower() for literal in literals}
    assert names <= set(ClientSettings.model_fields)
    spec = read(FOLDER / "client" / "statefulset.yaml")["spec"]
    assert spec["replicas"] == 1, "a client's private state is its own"
    assert spec["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"


# The files of ``deploy/monitoring``: every query names what is exported, and the alerts fire when they should.

FOLDER_MONITORING = ROOT / "deploy" / "monitoring"

ALERTS = FOLDER_MONITORING / "alerts.yaml"

LABEL = re.compile(r"(promptfed_\w+)\{(\w+)=~?\"([^\"]+)\"\}")


def exported() -> str:
    monitor = Monitor(Status("a", "trainer", "pets", "http://127.0.0.1:1"))
    return (Metrics().text() + monitor.exposition()).decode()


def rules() -> list[dict[str, Any]]:
    [group] = yaml.safe_load(ALERTS.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def queries() -> list[str]:
    panels = json.loads((FOLDER_MONITORING / "dashboard.json").read_text())["panels"]
    return [rule["expr"] for rule in rules()] + [target["expr"] for panel in panels for target in panel["targets"]]


def test_every_query_names_metrics_that_are_exported() -> None:
    described = set(re.findall(r"^# TYPE (\w+) (?:counter|gauge)", exported(), re.MULTILINE))
    for name in re.findall(r"^# TYPE (\w+) histogram", exported(), re.MULTILINE):
        described |= {name + suffix for suffix in ("_bucket", "_sum", "_count")}
    named = {name for query in queries() for name in re.findall(r"promptfed_\w+", query)}
    assert len(named) > 12
    assert named <= described


def test_series_that_alerts_watch_are_there_from_the_start() -> None:
    """Else the first increase would go unseen, and a wrong label would never be noticed."""
    text = exported()
    kinds = {kind.kind for kind in vars(problems).values() if isinstance(kind, type) and hasattr(kind, "kind")}
    assert set(ALERTING) <= kinds
    watched = [found for rule in rules() for found in LABEL.findall(rule["expr"])]
    assert len(watched) >= 8
    for metric, label, values in watched:
        for value in values.split("|"):
            assert f'{metric}{{{label}="{value}"}} 0.0' in text
