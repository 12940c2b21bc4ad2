"""The compose file and the images agree with the code; no image is built here."""

import dataclasses
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from redis import Redis
from redis.backoff import ConstantBackoff
from redis.exceptions import AuthenticationError
from redis.retry import Retry

from deploy.redis.ports import free_port
from deploy.redis.server import find_redis_server
from gateway.settings import GatewaySettings
from gpu_worker.settings import WorkerSettings
from scheduler_svc.settings import SchedulerSettings
from shared.settings import env_name
from shared.version import version

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
DOCKERFILE = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()

# The image chooses the addresses inside a container.
FIXED = {
    "PAGESTREAM_HOST",
    "PAGESTREAM_PORT",
    "PAGESTREAM_GATEWAY_METRICS_HOST",
    "PAGESTREAM_GATEWAY_METRICS_PORT",
    "PAGESTREAM_SCHEDULER_METRICS_HOST",
    "PAGESTREAM_SCHEDULER_METRICS_PORT",
    "PAGESTREAM_WORKER_METRICS_HOST",
    "PAGESTREAM_WORKER_METRICS_PORT",
}


@pytest.mark.parametrize(
    ("service", "settings"),
    [
        ("gateway", GatewaySettings),
        ("scheduler", SchedulerSettings),
        ("worker", WorkerSettings),
    ],
)
def test_every_setting_of_a_service_can_be_set_from_outside(service: str, settings: type) -> None:
    wanted = {env_name(field) for field in dataclasses.fields(settings)} - FIXED
    passed = {line.partition("=")[0] for line in COMPOSE["services"][service]["environment"]}
    assert {name for name in passed if not name.startswith(("HF_", "OTEL_"))} == wanted, (
        "docker-compose.yml must pass on exactly the settings that the service has"
    )


def test_every_service_of_ours_is_built_from_a_stage_that_exists() -> None:
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE))
    targets = {s["build"]["target"] for s in COMPOSE["services"].values() if "build" in s}
    assert targets == stages - {"base"} == {"gateway", "scheduler", "worker"}


def test_each_rank_of_the_tensor_parallel_file_has_a_number_and_its_own_address() -> None:
    ranks: dict[str, Any] = yaml.safe_load(
        (ROOT / "docker-compose.tensor-parallel.yml").read_text()
    )
    assert ranks["services"].pop("scheduler")["depends_on"].keys() == {"worker-1"}
    for rank, (name, described) in enumerate(ranks["services"].items()):
        size = len(ranks["services"])
        wanted = {"TENSOR_PARALLEL_SIZE": size, "RANK": rank, "RANK_HOST": name}
        assert described["environment"] == [f"PAGESTREAM_{k}={v}" for k, v in wanted.items()]
        assert COMPOSE["services"][name]["image"] == "pagestream-worker"
        assert COMPOSE["services"][name].get("scale", 1) == (0 if rank else 1)


def test_images_run_as_a_user_without_rights_and_check_their_health() -> None:
    for stage in re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[2:]:
        assert re.search(r"^USER pagestream$", stage, re.MULTILINE)
        assert re.search(r"^HEALTHCHECK ", stage, re.MULTILINE)


def test_services_run_under_a_spawner_and_all_that_it_imports_is_copied() -> None:
    spawners = r'^CMD \["python", "-m", "deploy.processes.spawner", "(\w+)"\]$'
    services = re.findall(spawners, DOCKERFILE, re.M)
    assert services == ["scheduler_svc", "gateway", "gpu_worker"]
    base = DOCKERFILE.partition(" AS base\n")[2].partition("\nFROM ")[0].replace("\\\n", " ")
    copied = set()
    packages = "deploy|gateway|gpu_worker|scheduler_svc"
    for line in re.findall(rf"^COPY ((?:{packages})/.*)$", base, re.M):
        *sources, folder = line.split()
        copied |= set(sources)
        assert all(f"{Path(source).parent}/" == folder for source in sources)
    todo, seen = {"deploy.processes.spawner", "deploy.health"}, set()
    while todo:
        module = todo.pop()
        seen.add(module)
        path = Path(*module.split(".")).with_suffix(".py")
        assert {str(path), *(f"{above}/__init__.py" for above in path.parents[:-1])} <= copied
        source = (ROOT / path).read_text()
        todo |= set(re.findall(rf"^from ((?:{packages})\.[\w.]+) import", source, re.M)) - seen


def test_images_are_labelled_with_the_version_that_services_report() -> None:
    base = DOCKERFILE.partition(" AS base\n")[2].partition("\nFROM ")[0]
    [label] = re.findall(r'org.opencontainers.image.version="([^"]+)"', base)
    assert label == version()
    assert f"\n## {label} " in (ROOT / "CHANGELOG.md").read_text()


def test_only_the_worker_image_holds_torch() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    with_torch = re.findall(r'^(\w+) = \[[^]]*"torch', project, re.MULTILINE)
    assert with_torch == ["worker"]


def test_all_folders_that_are_mounted_exist() -> None:
    for service in COMPOSE["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            if source.startswith("./"):
                assert (ROOT / source).exists(), source
            elif not source.startswith("$"):
                assert source in COMPOSE["volumes"], source


@pytest.mark.parametrize("service", COMPOSE["services"])
def test_containers_have_no_rights_and_write_nowhere_but_into_volumes(service: str) -> None:
    described = COMPOSE["services"][service]
    assert described["read_only"] is True
    assert described["cap_drop"] == ["ALL"]
    assert described["security_opt"] == ["no-new-privileges:true"]
    assert not described["user"].startswith(("0", "root"))
    assert "privileged" not in described


def test_only_clients_and_this_machine_reach_the_containers() -> None:
    published = {
        name: described["ports"]
        for name, described in COMPOSE["services"].items()
        if "ports" in described
    }
    assert published.pop("gateway") == ["8000:8000"]
    for ports in published.values():
        assert all(port.startswith("127.0.0.1:") for port in ports), ports


def test_prometheus_scrapes_the_ports_that_the_images_open() -> None:
    config = yaml.safe_load((ROOT / "monitoring" / "prometheus.yml").read_text())
    for job in config["scrape_configs"]:
        [target] = job["static_configs"][0]["targets"]
        service, _, port = target.partition(":")
        stage = DOCKERFILE.partition(f" AS {service}\n")[2].partition("\nFROM ")[0]
        assert re.search(rf"^EXPOSE .*\b{port}\b", stage, re.MULTILINE), target


def test_services_stop_before_what_they_need() -> None:
    services = COMPOSE["services"]
    assert "scheduler" in services["gateway"]["depends_on"]
    assert "worker" in services["scheduler"]["depends_on"]
    assert all("redis" in services[name]["depends_on"] for name in ("worker", "gateway"))


def test_redis_of_the_compose_file_requires_its_password_and_keeps_a_log(tmp_path: Path) -> None:
    redis = COMPOSE["services"]["redis"]
    port = free_port()
    shell, flag, script = redis["command"]
    script = script.replace("$$", "$").replace("redis-server -", f"{find_redis_server()} -")
    script = script.replace("--dir /data", f"--dir {tmp_path} --port {port} --bind 127.0.0.1")
    environ = {"REDISCLI_AUTH": "it is secret", "PATH": os.environ["PATH"]}
    assert [line.partition("=")[0] for line in redis["environment"]] == ["REDISCLI_AUTH"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([shell, flag, script], env=environ, stdout=log, stderr=log)
    try:
        retry = Retry(ConstantBackoff(0.05), 200)
        client = Redis(port=port, password="it is secret", retry=retry)
        assert client.config_get("appendonly") == {"appendonly": "yes"}
        assert client.config_get("appendfsync") == {"appendfsync": "everysec"}
        client.close()
        other = Redis(port=port)
        with pytest.raises(AuthenticationError):
            other.ping()
        other.close()
        commands = Path("/proc").glob("[0-9]*/cmdline")
        assert not [path for path in commands if b"it is secret" in _bytes(path)]
    finally:
        process.terminate()
        assert process.wait(10) == 0, "the signal must reach Redis, not only the shell"


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process has ended
        return b""
