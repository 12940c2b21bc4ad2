"""Alert rules, judged by Prometheus's own tool."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.monitoring.expressions import MONITORING, rules

CASES = Path(__file__).with_name("alerts_test.yml")


def promtool(*arguments: str | Path) -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not on PATH; it comes with Prometheus")
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_accepts_its_configuration_and_the_rules() -> None:
    promtool("check", "config", MONITORING / "prometheus.yml")


def test_each_alert_fires_when_it_should_and_not_before() -> None:
    promtool("test", "rules", CASES)


def test_each_alert_has_a_case() -> None:
    cases = yaml.safe_load(CASES.read_text())["tests"]
    tried = {
        test["alertname"]
        for case in cases
        for test in case["alert_rule_test"]
        if test.get("exp_alerts")
    }
    assert tried == {rule["alert"] for rule in rules("alerts.yml")}


def test_each_alert_has_a_line_on_what_to_do() -> None:
    text = (MONITORING.parent / "docs" / "OPERATIONS.md").read_text()
    described = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert {rule["alert"] for rule in rules("alerts.yml")} <= set(described)
