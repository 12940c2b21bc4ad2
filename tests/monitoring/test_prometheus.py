"""A real Prometheus scrapes a running PageStream, and every chart has something to show."""

import json
import math
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.redis.ports import free_port
from tests.deploy.running import Running
from tests.monitoring.expressions import MONITORING, dashboard_questions

DEADLINE_S = 60.0
WINDOW = "15s"


class Prometheus:
    """A server with the project's configuration, but for addresses and intervals."""

    def __init__(self, binary: str, folder: Path, targets: dict[str, str]) -> None:
        config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(MONITORING / name) for name in config["rule_files"]]
        for job in config["scrape_configs"]:
            job["static_configs"][0]["targets"] = [targets[job["job_name"]]]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._port = free_port()
        self._log = folder / "prometheus.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    binary,
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self._port}",
                ],
                stdout=log,
                stderr=log,
            )

    def ask(self, path: str, **parameters: str) -> Any:
        """Data of an answer of the HTTP API, None while there is no answer."""
        query = urllib.parse.urlencode(parameters)
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{query}"
        try:
            with urllib.request.urlopen(url, timeout=10) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            with error:
                if error.code < 500:  # it does not like the question
                    pytest.fail(f"{path} {parameters}: {error.read().decode()}")
                return None
        except OSError:
            return None

    def has_value(self, expression: str) -> bool:
        """Whether an expression has a finite value now."""
        data = self.ask("query", query=expression)
        values = [float(row["value"][1]) for row in data["result"]] if data else []
        return any(map(math.isfinite, values))

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def log(self) -> str:
        return self._log.read_text()[-2000:]


@pytest.fixture(scope="module")
def binary() -> str:
    """Path of Prometheus's program; the tests are skipped without it, before anything starts."""
    found = shutil.which("prometheus")
    if found is None:
        pytest.skip("prometheus is not on PATH (Debian, Ubuntu: apt install prometheus)")
    return found


@pytest.fixture(scope="module")
def running(binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    # With virtual memory, for the charts of what is mapped are empty without.
    started = Running(tmp_path_factory.mktemp("serve"), "--kv-memory", "virtual")
    try:
        started.until_ready()
        yield started
    finally:
        started.close()


@pytest.fixture(scope="module")
def prometheus(
    binary: str, running: Running, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    ports = running.metrics | {"gateway": running.port}
    targets = {job: f"127.0.0.1:{port}" for job, port in ports.items()}
    server = Prometheus(binary, tmp_path_factory.mktemp("prometheus"), targets)
    yield server
    server.close()


def test_every_service_can_be_scraped(running: Running, prometheus: Prometheus) -> None:
    def all_up() -> bool:
        data = prometheus.ask("targets") or {"activeTargets": []}
        health = {t["labels"]["job"]: t["health"] for t in data["activeTargets"]}
        return health == {"gateway": "up", "scheduler": "up", "worker": "up"}

    running.until(all_up, DEADLINE_S, f"a scrape of every service {prometheus.log()}")


def test_every_chart_has_something_to_show(running: Running, prometheus: Prometheus) -> None:
    waiting = {
        question.concrete(WINDOW): question
        for question in dashboard_questions()
        if "routed_requests" not in question.text  # of fleets alone
    }

    def all_answered() -> bool:
        running.complete()
        for expression in list(waiting):
            if prometheus.has_value(expression):
                del waiting[expression]
        return not waiting

    try:
        running.until(all_answered, DEADLINE_S, "an answer to every question")
    except AssertionError as error:
        missing = "\n".join(f"{q.place}: {text}" for text, q in waiting.items())
        raise AssertionError(f"no value for\n{missing}") from error


def test_no_alert_fires_while_all_is_well(running: Running, prometheus: Prometheus) -> None:
    def evaluated() -> bool:
        groups = (prometheus.ask("rules") or {"groups": []})["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        assert not [rule for rule in rules if rule["health"] == "err"]
        return bool(rules) and all(rule["health"] == "ok" for rule in rules)

    running.until(evaluated, DEADLINE_S, "an evaluation of every alert rule")
    assert prometheus.ask("alerts") == {"alerts": []}
