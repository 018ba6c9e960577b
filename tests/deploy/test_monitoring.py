"""The files of ``deploy/monitoring``: every query names what is exported, and the alerts fire when they should."""

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
from promptfed.coordinator import problems
from promptfed.coordinator.engine.metrics import ALERTING, Metrics
from tests import ROOT

FOLDER = ROOT / "deploy" / "monitoring"
ALERTS = FOLDER / "alerts.yaml"
WITHOUT = "alert rules: apt-get install prometheus"
LABEL = re.compile(r"(promptfed_\w+)\{(\w+)=~?\"([^\"]+)\"\}")


def exported() -> str:
    monitor = Monitor(Status("a", "trainer", "pets", "http://127.0.0.1:1"))
    return (Metrics().text() + monitor.exposition()).decode()


def rules() -> list[dict[str, Any]]:
    [group] = yaml.safe_load(ALERTS.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def queries() -> list[str]:
    panels = json.loads((FOLDER / "dashboard.json").read_text())["panels"]
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


@pytest.mark.skipif(shutil.which("promtool") is None, reason=WITHOUT)
def test_promtool_accepts_the_rules() -> None:
    done = subprocess.run(["promtool", "check", "rules", str(ALERTS)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"{len(rules())} rules found" in done.stdout


@pytest.mark.skipif(shutil.which("promtool") is None, reason=WITHOUT)
@pytest.mark.parametrize(
    ("alert", "series", "values", "fires"),
    [
        ("CoordinatorDown", 'up{job="promptfed-coordinator"}', "1 0x9", True),
        ("CoordinatorDown", 'up{job="promptfed-coordinator"}', "1x10", False),
        ("FederationPaused", 'promptfed_federation_moves_total{state="paused"}', "0x4 1x5", True),
        ("FederationPaused", 'promptfed_federation_moves_total{state="paused"}', "3x10", False),
        ("FederationFailed", 'promptfed_federation_moves_total{state="failed"}', "0x4 1x5", True),
        ("StorageFull", 'promptfed_refusals_total{kind="storage-full"}', "0x4 2x5", True),
        ("WrongTokens", 'promptfed_refusals_total{kind="unauthorized"}', "0+10x10", True),
        ("WrongTokens", 'promptfed_refusals_total{kind="unauthorized"}', "0+1x10", False),
        ("UpdatesRefused", 'promptfed_updates_total{verdict="rejected"}', "0+2x10", True),
        ("PrivacyRefused", 'promptfed_privacy_failures_total{kind="privacy-missing"}', "0x4 1x5", True),
        ("ClientFailing", 'promptfed_client_events_total{event="failed"}', "0+1x10", True),
    ],
)
def test_alerts_fire_when_they_should(tmp_path: Path, alert: str, series: str, values: str, fires: bool) -> None:
    firing: dict[str, Any] = {"eval_time": "9m", "alertname": alert}
    labels = dict(re.findall(r'(\w+)="([^"]+)"', series))
    if fires:
        [rule] = [rule for rule in rules() if rule["alert"] == alert]
        told = {key: re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels.get(found[1], ""), text)
                for key, text in rule["annotations"].items()}  # fmt: skip
        firing["exp_alerts"] = [{"exp_labels": labels, "exp_annotations": told}]
    tests = [{"interval": "1m", "input_series": [{"series": series, "values": values}], "alert_rule_test": [firing]}]
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": tests}))
    command = ["promtool", "test", "rules", str(tmp_path / "test.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
