"""The manifests for Kubernetes agree with the images and the code; kubectl builds the overlays."""

import dataclasses
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from starlette.responses import JSONResponse

from gateway.http.management import management_routes
from gateway.settings import GatewaySettings
from gpu_worker.settings import WorkerSettings
from scheduler_svc.settings import SchedulerSettings
from shared.metrics import GatewayMetrics
from shared.settings import env_name, load

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
DOCKERFILE = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
OVERLAYS = sorted(path.name for path in (FOLDER / "overlays").iterdir())
SERVICES = {"gateway": GatewaySettings, "scheduler": SchedulerSettings, "worker": WorkerSettings}
SECRETS = {"pagestream-redis", "pagestream-api-keys"}  # as docs/OPERATIONS.md makes them
Object = dict[str, Any]


@cache
def built(overlay: str) -> list[Object]:
    """The objects of an overlay."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    command = ["kubectl", "kustomize", str(FOLDER / "overlays" / overlay)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return list(yaml.safe_load_all(found.stdout))


def pods(overlay: str) -> Iterator[Object]:
    for one in built(overlay):
        if one["kind"] in ("Deployment", "StatefulSet"):
            yield one["spec"]["template"]


def containers(overlay: str) -> Iterator[Object]:
    for pod in pods(overlay):
        yield from pod["spec"].get("initContainers", [])
        yield from pod["spec"]["containers"]


def of_kind(overlay: str, kind: str) -> list[Object]:
    return [one for one in built(overlay) if one["kind"] == kind]


def ports_of(labels: dict[str, str], overlay: str) -> dict[str, int]:
    """Ports of the pods with these labels, by name."""
    found = {}
    for pod in pods(overlay):
        if labels.items() <= pod["metadata"]["labels"].items():
            for one in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
                found |= {port["name"]: port["containerPort"] for port in one.get("ports", ())}
    return found


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_images_are_those_that_compose_builds_or_pulls(overlay: str) -> None:
    ours = {f"pagestream-{service}" for service in SERVICES}
    for container in containers(overlay):
        image = container["image"]
        assert image in {*ours, "pagestream-worker:cuda", COMPOSE["services"]["redis"]["image"]}
        if image.partition(":")[0] in ours:
            assert image.partition(":")[0] == f"pagestream-{container['name']}"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_variable_is_a_setting_with_a_valid_value(overlay: str) -> None:
    [config] = of_kind(overlay, "ConfigMap")
    settings = {
        service: {env_name(field) for field in dataclasses.fields(cls)}
        for service, cls in SERVICES.items()
    }
    of_any = set.union(*settings.values())
    shared = {name: value for name, value in config["data"].items() if name != "REDIS_MAXMEMORY"}
    assert shared.keys() <= of_any
    for container in containers(overlay):
        if container["name"] not in SERVICES:
            continue
        assert container["envFrom"] == [{"configMapRef": {"name": config["metadata"]["name"]}}]
        own = {one["name"]: one.get("value", "secret") for one in container["env"]}
        known = own.keys() - {"REDIS_PASSWORD", "POD_NAME"}
        advertised = {"PAGESTREAM_ADVERTISED_REDIS_URL", "PAGESTREAM_DIRECTORY_URL"}
        assert known <= settings[container["name"]] | advertised
        for number, one in enumerate(container["env"]):  # Kubernetes replaces earlier names only
            earlier = {other["name"] for other in container["env"][:number]}
            assert set(re.findall(r"\$\((\w+)\)", one.get("value", ""))) <= earlier
        load(SERVICES[container["name"]], {}, shared | {name: own[name] for name in known})


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_ports_are_those_of_the_images_and_every_name_of_a_port_exists(overlay: str) -> None:
    exposed = {
        int(port) for line in re.findall(r"EXPOSE (.*)", DOCKERFILE) for port in line.split()
    }
    for container in containers(overlay):
        found = {port["containerPort"] for port in container.get("ports", ())}
        assert found <= exposed | {6379}
    for service in of_kind(overlay, "Service"):
        names = ports_of(service["spec"]["selector"], overlay)
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names.keys()
    for policy in of_kind(overlay, "NetworkPolicy"):
        names = ports_of(policy["spec"]["podSelector"].get("matchLabels", {}), overlay)
        for rule in policy["spec"].get("ingress", ()):
            assert {port["port"] for port in rule["ports"]} <= names.keys()
    for monitor in of_kind(overlay, "PodMonitor"):
        names = ports_of(monitor["spec"]["selector"]["matchLabels"], overlay)
        endpoints = monitor["spec"]["podMetricsEndpoints"]
        assert {endpoint["port"] for endpoint in endpoints} <= names.keys()
        assert {endpoint["path"] for endpoint in endpoints} == {"/metrics"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_probe_checks_something_that_exists(overlay: str) -> None:
    paths = {route.path for route in management_routes(GatewayMetrics("m", "e"), JSONResponse)}
    checks = {*SERVICES, "worker-ready", "engine-ready"}
    for container in containers(overlay):
        probes = [value for name, value in container.items() if name.endswith("Probe")]
        assert {"startupProbe", "livenessProbe"} <= container.keys(), container["name"]
        for probe in probes:
            if "httpGet" in probe:
                names = {port["name"] for port in container["ports"]}
                assert probe["httpGet"]["port"] in names
                assert probe["httpGet"]["path"] in paths
            elif container["name"] != "redis":
                command = probe["exec"]["command"]
                assert command[:3] == ["python", "-m", "deploy.health"]
                assert command[3] in checks


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_are_hardened_and_have_longer_to_stop_than_they_drain(overlay: str) -> None:
    [config] = of_kind(overlay, "ConfigMap")
    for pod in pods(overlay):
        assert pod["spec"]["securityContext"]["runAsNonRoot"]
        assert not pod["spec"]["automountServiceAccountToken"]
        names = {container["name"] for container in pod["spec"]["containers"]}
        if names & SERVICES.keys():
            grace_s = pod["spec"]["terminationGracePeriodSeconds"]
            assert grace_s > float(config["data"]["PAGESTREAM_DRAIN_TIMEOUT"]) + 15
    for container in containers(overlay):
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert not context["allowPrivilegeEscalation"]
        for one in container["env"]:
            secret = one.get("valueFrom", {}).get("secretKeyRef")
            assert secret is None or secret["name"] in SECRETS


def test_engines_of_a_fleet_have_a_redis_each_that_starts_first_and_stops_last() -> None:
    [engine] = [
        one for one in of_kind("fleet", "StatefulSet") if one["metadata"]["name"] == "engine"
    ]
    assert "replicas" not in engine["spec"]  # KEDA sets them
    pod = engine["spec"]["template"]["spec"]
    assert [one["name"] for one in pod["initContainers"]] == ["redis", "worker"]
    assert {one["restartPolicy"] for one in pod["initContainers"]} == {"Always"}
    env = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
    assert env["PAGESTREAM_ADVERTISED_REDIS_URL"].endswith("@$(POD_NAME).engine:6379/0")
    [scaled] = of_kind("fleet", "ScaledObject")
    assert scaled["spec"]["scaleTargetRef"]["name"] == "engine"
    operations = (ROOT / "docs" / "OPERATIONS.md").read_text()
    text = str(scaled["spec"]["triggers"]) + "".join(re.findall(r"-metric` \|.*", operations))
    metrics = set(re.findall(r"pagestream:(\w+)", text))
    source = (ROOT / "shared" / "metrics.py").read_text()
    assert {"num_waiting_tokens", "kv_cache_usage_perc"} <= metrics
    assert all(f'"{name}"' in source for name in metrics)
    scaling = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    # Longer than a model loads; and one at a time, in longer than it drains.
    assert scaling["scaleDown"]["stabilizationWindowSeconds"] >= 600
    [slowest] = scaling["scaleDown"]["policies"]
    assert slowest["value"] == 1
    assert slowest["periodSeconds"] > pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_objects_are_valid_by_the_schemas_of_kubernetes(overlay: str) -> None:
    validate = pytest.importorskip(
        "kubernetes_validate", reason="pip install kubernetes-validate (110 MB of schemas)"
    )
    for one in built(overlay):
        if one["kind"] not in ("PodMonitor", "ScaledObject"):  # not Kubernetes' own
            validate.validate(one, "1.34", strict=True)
