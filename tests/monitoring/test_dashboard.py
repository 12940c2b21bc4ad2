"""The dashboards conform to Grafana's classic dashboard model, checked piece by piece."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from tests.monitoring.expressions import (
    DASHBOARDS,
    MONITORING,
    Question,
    exposed_series,
    panels,
    selectors,
)

ROOT = MONITORING.parent
SCHEMA_VERSION = 42  # of Grafana 12 and 13
NUM_COLUMNS = 24
HOME = MONITORING / "grafana" / "dashboards" / "pagestream.json"
UNITS = {"bytes", "percentunit", "short", "s", "reqps", "dateTimeAsIso"}


@pytest.fixture(params=DASHBOARDS, ids=lambda path: path.stem)
def dashboard(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(request.param.read_text())
    return found


def charts(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in panels(dashboard) if panel["type"] != "row"]


def test_a_dashboard_can_be_loaded_again_and_again(dashboard: dict[str, Any]) -> None:
    assert dashboard["schemaVersion"] == SCHEMA_VERSION
    assert re.fullmatch(r"[a-z0-9-]{8,40}", dashboard["uid"])
    assert dashboard.get("id") is None  # the number that one Grafana gave it
    assert dashboard["title"]
    assert set(dashboard["time"]) == {"from", "to"}


def test_panels_have_ids_of_their_own(dashboard: dict[str, Any]) -> None:
    ids = [panel["id"] for panel in panels(dashboard)]
    assert all(isinstance(panel_id, int) and panel_id > 0 for panel_id in ids)
    assert len(set(ids)) == len(ids)


def test_panels_lie_on_the_grid_and_not_on_each_other(dashboard: dict[str, Any]) -> None:
    cells: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        assert at["x"] >= 0
        assert at["y"] >= 0
        assert at["x"] + at["w"] <= NUM_COLUMNS
        covered = set(
            itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"]))
        )
        assert covered, panel["title"]
        assert not cells & covered, panel["title"]
        cells |= covered


def test_rows_hold_what_follows_them(dashboard: dict[str, Any]) -> None:
    rows = [panel for panel in dashboard["panels"] if panel["type"] == "row"]
    assert dashboard["panels"][0] is rows[0]
    for row in rows:
        assert (row["collapsed"], row["panels"]) == (False, [])
        assert row["gridPos"]["w"] == NUM_COLUMNS


def test_a_chart_has_a_title_and_a_unit(dashboard: dict[str, Any]) -> None:
    for panel in charts(dashboard):
        assert panel["type"] in ("timeseries", "stat"), panel["title"]
        assert panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert isinstance(panel["fieldConfig"]["overrides"], list)
        assert panel["targets"], panel["title"]


def test_a_chart_queries_the_data_source_that_the_user_chose(dashboard: dict[str, Any]) -> None:
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    for panel in charts(dashboard):
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs), panel["title"]
        for asking in (panel, *panel["targets"]):
            assert asking["datasource"] == chosen, panel["title"]


def test_legends_name_labels_that_the_answer_has(dashboard: dict[str, Any]) -> None:
    series = exposed_series()
    for panel in charts(dashboard):
        for target in panel["targets"]:
            question = Question(panel["title"], target["expr"])
            expression = promql_parser.parse(question.concrete("5m"))
            if isinstance(expression, promql_parser.AggregateExpr):
                labels = set(expression.modifier.labels) if expression.modifier else set()
            else:
                labels = set().union(*(series[s.name].labels for s in selectors(expression)))
            asked = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert asked <= labels, (panel["title"], target["legendFormat"])


def test_variables_are_declared_and_used(dashboard: dict[str, Any]) -> None:
    declared = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-zA-Z]\w*)", json.dumps(dashboard["panels"])))
    assert declared == used
    assert "datasource" in declared


def test_kv_memory_comes_first() -> None:
    first = read(HOME)["panels"]
    assert first[0]["title"] == "KV memory"
    top = first[1]
    assert "kv_cache_bytes" in top["targets"][0]["expr"]
    assert top["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal"


def test_dashboards_have_ids_and_titles_of_their_own() -> None:
    found = [(read(path)["uid"], read(path)["title"]) for path in DASHBOARDS]
    assert len({uid for uid, _ in found}) == len({title for _, title in found}) == len(found) == 4


def test_mapping_is_shown_with_the_part_that_steps_waited_for() -> None:
    asked = {
        target["expr"].partition("{")[0].rpartition("pagestream:")[2]
        for panel in charts(read(HOME))
        for target in panel["targets"]
    }
    assert {"worker_kv_map_seconds_sum", "worker_kv_map_wait_seconds_sum"} <= asked
    assert {"worker_kv_map_wait_seconds_bucket", "worker_kv_mapped_bytes"} <= asked


def test_grafana_is_configured_with_the_places_of_dashboards_and_data() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    mounts = dict(volume.split(":")[:2] for volume in compose["grafana"]["volumes"])
    provisioning = MONITORING / "grafana" / "provisioning"
    assert mounts["./monitoring/grafana/provisioning"] == "/etc/grafana/provisioning"

    [provider] = read(provisioning / "dashboards" / "pagestream.yml")["providers"]
    assert mounts["./monitoring/grafana/dashboards"] == provider["options"]["path"]
    home = next(
        line.partition("=")[2]
        for line in compose["grafana"]["environment"]
        if line.startswith("GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH=")
    )
    assert home == f"{provider['options']['path']}/{HOME.name}"

    [source] = read(provisioning / "datasources" / "prometheus.yml")["datasources"]
    assert source["type"] == "prometheus"
    assert source["url"] == "http://prometheus:9090"


def test_images_are_pinned_by_version_and_every_file_of_rules_is_mounted() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    for name in ("prometheus", "grafana"):
        assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", compose[name]["image"])
    mounted = {Path(volume.split(":")[1]).name for volume in compose["prometheus"]["volumes"]}
    assert set(read(MONITORING / "prometheus.yml")["rule_files"]) <= mounted


def test_prometheus_scrapes_the_services_that_compose_starts() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    jobs = read(MONITORING / "prometheus.yml")["scrape_configs"]
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in jobs}
    assert targets == {
        "gateway": ["gateway:9103"],
        "scheduler": ["scheduler:9101"],
        "worker": ["worker:9102"],
    }
    assert set(targets) <= set(compose)


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found
