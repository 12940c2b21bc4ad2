"""The compose file and the images agree with the code; building them is not a unit test's job."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.settings import GatewaySettings
from gpu_worker.settings import WorkerSettings
from scheduler_svc.settings import SchedulerSettings
from shared.settings import env_name

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
DOCKERFILE = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()

# Addresses inside a container are the image's to choose.
FIXED = {
    "PAGESTREAM_HOST",
    "PAGESTREAM_PORT",
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
    assert {name for name in passed if not name.startswith("HF_")} == wanted, (
        "docker-compose.yml must pass on exactly the settings that the service has"
    )


def test_every_service_of_ours_is_built_from_a_stage_that_exists() -> None:
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE))
    targets = {s["build"]["target"] for s in COMPOSE["services"].values() if "build" in s}
    assert targets == stages - {"base"} == {"gateway", "scheduler", "worker"}


def test_images_run_as_a_user_without_rights_and_check_their_health() -> None:
    for stage in re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[2:]:
        assert re.search(r"^USER pagestream$", stage, re.MULTILINE)
        assert re.search(r"^HEALTHCHECK ", stage, re.MULTILINE)


def test_only_the_worker_image_holds_torch() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    with_torch = re.findall(r'^(\w+) = \[.*"torch', project, re.MULTILINE)
    assert with_torch == ["worker"]


def test_all_folders_that_are_mounted_exist() -> None:
    for service in COMPOSE["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            if source.startswith("./"):
                assert (ROOT / source).exists(), source
            elif not source.startswith("$"):
                assert source in COMPOSE["volumes"], source
