"""Flags and variables of all services on one command line."""

import dataclasses
import socket
from pathlib import Path

import pytest

from deploy.options import find_model, read_options
from deploy.ports import Wanted, check_ports, free_port
from deploy.probe import health_address
from deploy.serve import listeners, resolve
from deploy.settings import REPOSITORY
from gateway.settings import GatewaySettings
from gpu_worker.settings import WorkerSettings
from scheduler_svc.settings import SchedulerSettings
from shared.errors import PageStreamError, SettingsError
from shared.settings import env_name, flag_name, load


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
            assert flag_name(field) in text
            assert env_name(field) in text


def test_a_model_is_looked_for_here_then_in_the_repository_then_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert find_model("mine") == str(tmp_path / "mine")
    assert find_model("models/demo") == str(REPOSITORY / "models" / "demo")
    assert find_model("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize("model", ["/no/where", "./here", "a/b/c", "empty"])
def test_what_can_be_no_model_is_refused_before_anything_starts(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=f"--model='{model}'"):
        find_model(model)


def test_port_zero_becomes_a_free_port_that_the_gateway_is_told() -> None:
    options = resolve(read_options(["--port", "0"], {}))
    assert options.gateway.port > 0
    assert load(GatewaySettings, {}, options.environ).port == options.gateway.port


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


def test_with_api_keys_the_gateway_says_how_it_is_on_a_port_that_asks_for_none() -> None:
    assert health_address(resolve(read_options(["--port", "81"], {})).gateway) == ("127.0.0.1", 81)
    options = resolve(read_options(["--port", "81"], {"PAGESTREAM_API_KEY": "k" * 16}))
    host, port = health_address(options.gateway)
    assert (host, port) == ("127.0.0.1", options.gateway.gateway_metrics_port)
    assert port not in (0, 81)
    assert load(GatewaySettings, {}, options.environ).gateway_metrics_port == port


def test_a_secret_is_no_flag() -> None:
    with pytest.raises(SystemExit):
        read_options(["--api-key", "k" * 16], {})
