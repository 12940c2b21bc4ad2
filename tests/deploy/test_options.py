"""Flags and variables of all services on one command line."""

import dataclasses
import os
import re
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from deploy.options import find_model, read_options
from deploy.redis.ports import Wanted, check_ports, free_port
from deploy.serve import listeners, metrics_urls, resolve, warnings
from deploy.service_probe import health_address
from deploy.settings import REPOSITORY
from gateway.settings import GatewaySettings
from gpu_worker.settings import WorkerSettings
from scheduler_svc.settings import SchedulerSettings
from shared.errors import PageStreamError, SettingsError
from shared.settings import env_name, flag_name, load
from shared.version import version


def test_a_flag_wins_over_a_variable_and_reaches_the_service_as_one() -> None:
    options = read_options(["--num-blocks", "7", "--port=81"], {"PAGESTREAM_NUM_BLOCKS": "5"})
    assert options.worker.num_blocks == 7
    assert options.gateway.port == 81
    assert load(WorkerSettings, {}, options.environ).num_blocks == 7
    assert load(GatewaySettings, {}, options.environ).port == 81


def test_a_flag_that_several_services_read_reaches_all() -> None:
    options = read_options(["--engine-id", "blue", "--redis-url", "redis://far:1/0"], {})
    for cls in (GatewaySettings, SchedulerSettings, WorkerSettings):
        assert load(cls, {}, options.environ).engine_id == "blue"
        assert load(cls, {}, options.environ).redis_url == "redis://far:1/0"
    assert not options.own_redis


@pytest.mark.parametrize(("environ", "own"), [({}, True), ({"REDIS_URL": "redis://a:1/0"}, False)])
def test_redis_is_started_only_if_none_is_named(environ: dict[str, str], own: bool) -> None:
    assert read_options([], environ).own_redis is own


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        ([], {"PAGESTREAM_BLOK_SIZE": "8"}, "PAGESTREAM_BLOK_SIZE='8'"),
        ([], {"PAGESTREAM_DTYPE": "int8"}, "PAGESTREAM_DTYPE='int8'"),
        (["--watermark", "0.9"], {}, "--watermark='0.9'"),
        (["--max-num-sequences", "many"], {}, "--max-num-sequences='many'"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named_with_its_value(
    argv: list[str], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        read_options(argv, environ)


def test_help_explains_every_setting_of_every_service(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_options(["--help"], {})
    text = capsys.readouterr().out
    for cls in (GatewaySettings, SchedulerSettings, WorkerSettings):
        for field in dataclasses.fields(cls):
            words = re.split(r"[^\w-]+", text)
            assert env_name(field) in words
            assert (flag_name(field) in words) is not field.metadata["setting"].secret


def test_a_model_is_looked_for_here_then_in_the_repository_then_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert find_model("mine") == str(tmp_path / "mine")
    assert find_model("models/demo") == str(REPOSITORY / "models" / "demo")
    assert find_model("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


def test_a_gguf_file_is_a_model_and_so_is_a_folder_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "one.gguf").touch()
    monkeypatch.chdir(tmp_path)
    assert find_model("mine") == find_model("mine/one.gguf") == str(tmp_path / "mine" / "one.gguf")
    (tmp_path / "mine" / "two.gguf").touch()
    with pytest.raises(SettingsError, match=r"several GGUF files; give one of one\.gguf, two\."):
        find_model("mine")


@pytest.mark.parametrize("model", ["/no/where", "./here", "a/b/c", "empty"])
def test_what_can_be_no_model_is_refused_before_anything_starts(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=f"--model='{model}'"):
        find_model(model)


def test_port_zero_becomes_a_free_port_for_the_gateway() -> None:
    options = resolve(read_options(["--port", "0"], {}))
    assert options.gateway.port > 0
    assert load(GatewaySettings, {}, options.environ).port == options.gateway.port


def test_metrics_ports_that_were_not_given_are_free_ones_and_printed() -> None:
    defaults = read_options([], {})
    with ExitStack() as others:
        for wanted in (defaults.scheduler.scheduler_metrics_port, 9102):
            with suppress(OSError):  # another server may have it already
                others.enter_context(socket.create_server(("127.0.0.1", wanted)))
        options = resolve(read_options(["--port", "0"], {}))
        check_ports(listeners(options))
    scheduler = load(SchedulerSettings, {}, options.environ).scheduler_metrics_port
    worker = load(WorkerSettings, {}, options.environ).worker_metrics_port
    assert len({scheduler, worker, options.gateway.port, 9101, 9102}) == 5
    assert metrics_urls(options) == [
        f"http://127.0.0.1:{options.gateway.port}/metrics (gateway)",
        f"http://127.0.0.1:{scheduler}/metrics (scheduler)",
        f"http://127.0.0.1:{worker}/metrics (worker)",
    ]


def test_a_metrics_port_that_was_given_is_not_exchanged_for_another() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        environ = {"PAGESTREAM_WORKER_METRICS_PORT": str(port)}
        options = resolve(read_options(["--port", "0"], environ))
        assert options.worker.worker_metrics_port == port
        with pytest.raises(PageStreamError, match=f"--worker-metrics-port={port}"):
            check_ports(listeners(options))


def test_the_services_ports_are_not_taken_for_metrics() -> None:
    options = resolve(read_options(["--port", "9102", "--gateway-metrics-port", "9101"], {}))
    ports = [want.port for want in listeners(options)]
    assert len(set(ports)) == 4


def test_servers_on_different_ports_keep_their_state_apart() -> None:
    launcher = read_options([], {}).launcher
    folders = {port: launcher.state_path(port) for port in (8000, 9000, 9001)}
    assert folders[8000] == REPOSITORY / ".pagestream"
    assert len(set(folders.values())) == 3
    named = read_options(["--state-dir", "/tmp/mine"], {}).launcher
    assert named.state_path(8000) == named.state_path(9000) == Path("/tmp/mine")


@pytest.mark.parametrize(
    ("argv", "environ", "warned"),
    [
        (["--host", "0.0.0.0"], {}, True),
        (["--host", "::"], {}, True),
        (["--host", "0.0.0.0"], {"PAGESTREAM_API_KEY": "k" * 16}, False),
        (["--host", "127.0.0.2"], {}, False),
        (["--host", "::1"], {}, False),
        (["--host", "localhost"], {}, False),
        ([], {}, False),
    ],
)
def test_a_server_without_keys_on_a_public_address_is_warned_about(
    argv: list[str], environ: dict[str, str], warned: bool
) -> None:
    assert bool(warnings(read_options(argv, environ))) is warned


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        (["--modle", "x"], {}, "--modle: there is no such flag; did you mean --model?"),
        (["--modle=x"], {}, "--modle: there is no such flag; did you mean --model?"),
        (["model"], {}, "model: there is no such flag"),
        (["--dtype", "bf16"], {}, "float16; did you mean bfloat16?"),
        ([], {"PAGESTREAM_PROT": "1"}, "did you mean PAGESTREAM_PORT?"),
        (["--redis-port", "1", "--redis-url", "redis://a:1/0"], {}, "--redis-port=1: no Redis"),
    ],
)
def test_a_misspelled_setting_is_answered_with_what_was_probably_meant(
    argv: list[str], environ: dict[str, str], message: str
) -> None:
    # As scripts/serve does before it installs anything: without any package.
    done = subprocess.run(
        [sys.executable, "-S", "-m", "deploy.check_settings", *argv],
        cwd=REPOSITORY,
        env={"PATH": os.environ["PATH"], **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "module",
    ["deploy.serve", "scheduler_svc", "gpu_worker", "scheduler_svc.explain"],
)
def test_every_program_prints_its_version(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--version"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, f"PageStream {version()}\n")


def test_a_metrics_port_of_zero_is_not_listened_on() -> None:
    options = read_options(["--worker-metrics-port=0", "--scheduler-metrics-port=0"], {})
    assert [want.setting for want in listeners(options)] == ["--port"]


def test_a_port_in_use_is_named_with_its_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(PageStreamError, match=rf"--port={port}: cannot listen .* in use"):
            check_ports([Wanted("--port", "127.0.0.1", port)])


def test_two_services_cannot_have_the_same_port() -> None:
    port = free_port()
    with pytest.raises(PageStreamError, match="--worker-metrics-port"):
        check_ports(
            [
                Wanted("--port", "127.0.0.1", port),
                Wanted("--worker-metrics-port", "127.0.0.1", port),
            ]
        )


def test_with_api_keys_the_gateway_has_a_health_port_without_a_key() -> None:
    assert health_address(resolve(read_options(["--port", "81"], {})).gateway) == ("127.0.0.1", 81)
    options = resolve(read_options(["--port", "81"], {"PAGESTREAM_API_KEY": "k" * 16}))
    host, port = health_address(options.gateway)
    assert (host, port) == ("127.0.0.1", options.gateway.gateway_metrics_port)
    assert port not in (0, 81)
    assert load(GatewaySettings, {}, options.environ).gateway_metrics_port == port


def test_a_secret_is_no_flag() -> None:
    with pytest.raises(SystemExit):
        read_options(["--api-key", "k" * 16], {})
