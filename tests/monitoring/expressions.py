"""The expressions in dashboards and alert rules, and the metrics that the services expose."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import yaml

from shared.metrics import GatewayMetrics, SchedulerMetrics, WorkerMetrics

MONITORING = Path(__file__).resolve().parents[2] / "monitoring"
DASHBOARDS = sorted((MONITORING / "grafana" / "dashboards").glob("*.json"))

# Labels that Prometheus adds to every series, and series that it makes itself.
TARGET_LABELS = frozenset({"job", "instance"})
MADE_BY_PROMETHEUS = {"up": "gauge"}


@dataclass(frozen=True, slots=True)
class Question:
    """One expression, and its ``place`` for the message of a failing test."""

    place: str
    text: str

    def concrete(self, window: str) -> str:
        """The expression as Grafana would send it."""
        text = self.text.replace("$__rate_interval", window).replace("$engine", ".*")
        assert "$" not in text, f"{self.place}: a variable that this test does not know: {text}"
        return text


@dataclass(frozen=True, slots=True)
class Series:
    """The metric of one name."""

    kind: str  # counter, gauge or histogram
    labels: frozenset[str]


def panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All panels, those inside collapsed rows too."""
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", ())


def dashboard_questions() -> list[Question]:
    """Every expression of every dashboard."""
    return [
        Question(f"{path.name}: {panel['title']} {target['refId']}", target["expr"])
        for path in DASHBOARDS
        for panel in panels(json.loads(path.read_text()))
        for target in panel.get("targets", ())
    ]


def alert_questions() -> list[Question]:
    """Every expression of every alert rule and recording rule."""
    return [
        Question(str(rule.get("alert") or rule["record"]), rule["expr"])
        for name in ("alerts.yml", "recording.yml")
        for rule in rules(name)
    ]


def rules(name: str) -> list[dict[str, Any]]:
    """The rules of a file."""
    groups = yaml.safe_load((MONITORING / name).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def exposed_series() -> dict[str, Series]:
    """Everything a scrape of the three services returns, by name, and what rules record."""
    found = {name: Series(kind, TARGET_LABELS) for name, kind in MADE_BY_PROMETHEUS.items()}
    found |= {
        rule["record"]: Series("gauge", frozenset({"engine"})) for rule in rules("recording.yml")
    }
    gateway, scheduler = GatewayMetrics("model", "engine"), SchedulerMetrics("model", "engine")
    # Series whose labels have no values at the start.
    gateway.of_model("model").routed_requests.inc(1, "engine", "reason")
    scheduler.tenant_tokens.inc(1, "tenant", "kind")
    scheduler.tenant_block_seconds.inc(1, "tenant")
    for metrics in (gateway, scheduler, WorkerMetrics("model", "engine")):
        for family in metrics.registry.collect():
            for sample in family.samples:
                labels = TARGET_LABELS | sample.labels.keys()
                found[sample.name] = Series(family.type, labels)
    return found


def walk(expression: Any) -> Iterator[Any]:
    """An expression and all its parts."""
    parts: list[Any] = []
    promql_parser.walk(expression, lambda part: parts.append(part))
    return iter(parts)


def selectors(expression: Any) -> list[Any]:
    """The vector selectors of an expression; those inside ranges too."""
    return [part for part in walk(expression) if isinstance(part, promql_parser.VectorSelector)]
