"""A Redis that asks who one is, and one that speaks TLS."""

import asyncio
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from shared.bus.api import START, Append
from shared.bus.redis_bus import RedisBus
from shared.errors import BusUnavailable, LoginRefused, SettingsError
from tests.support.processes.redis_cluster import RedisCluster

ROOT = Path(__file__).parents[3]
USER, PASSWORD = "pagestream", "correct-horse"
# What docs/OPERATIONS.md tells to give the services.
RULES = (
    *("on", f">{PASSWORD}", "~{*}:*", "~engines", "-@all", "+@connection", "+info", "+time"),
    *("+xadd", "+xread", "+xlen", "+xinfo", "+xtrim", "+exists", "+get", "+set", "+del", "+mget"),
    *("+unlink", "+hincrby", "+hgetall", "+hdel"),
    *("+pexpire", "+sadd", "+smembers", "+multi", "+exec", "+eval", "+evalsha"),
)


@pytest.fixture
def guarded_url(redis_url: str) -> Iterator[str]:
    """The server, with a user who may do what the bus needs and nothing else."""
    admin = redis.Redis.from_url(redis_url)
    admin.execute_command("ACL", "SETUSER", USER, "reset", *RULES)
    yield redis_url.replace("redis://", f"redis://{USER}:{PASSWORD}@")
    admin.execute_command("ACL", "DELUSER", USER)
    admin.close()


async def _use(bus: RedisBus) -> None:
    """Everything that services ask of a bus."""
    await bus.check_server()
    await bus.run_id()
    await bus.now_ms()
    epoch = await bus.now_ms()
    log = "{engine-0}:outputs"
    await bus.append(Append(log, [b"one"], epoch, 0, trim_below=START))
    await bus.append_all([Append(log, [b"two"], epoch), Append("{engine-0}:plans", [b"x"])])
    found = await bus.read({log: START}, 100, 10)
    assert [entry.messages for entry in found[log]] == [(b"one",), (b"two",)]
    assert await bus.length(log) == 2
    assert (await bus.last_id(log)).epoch == epoch
    await bus.put("{engine-0}:info", b"lease", 1_000)
    assert await bus.get("{engine-0}:info") == b"lease"
    await bus.add_engine("engine-0")
    assert await bus.engines() == ["engine-0"]


async def test_a_user_with_few_rights_is_enough(guarded_url: str) -> None:
    bus = RedisBus(guarded_url)
    await _use(bus)
    with pytest.raises(BusUnavailable, match=r"(?i)noperm|no permissions"):
        await bus.put("somebody-elses-key", b"", 1_000)
    await bus.close()


async def test_the_same_rights_and_those_to_find_nodes_are_enough_in_a_cluster(
    redis_cluster: RedisCluster,
) -> None:
    key = "{engine-0}:outputs"
    nodes = redis_cluster.primaries
    for node in nodes:
        rules = (*RULES, "+cluster|slots")
        node.client.execute_command("ACL", "SETUSER", USER, "reset", *rules)
    url = redis_cluster.url.replace("://", f"://{USER}:{PASSWORD}@")
    bus = RedisBus.of_engine(url, "engine-0")
    try:
        await _use(bus)
        target = redis_cluster.other_than(redis_cluster.owner(key))
        with redis_cluster.moving(key, target) as migrate:
            migrate(key)
            await bus.append(Append(key, [b"three"]))
        await bus.append(Append(key, [b"four"]))
    finally:
        await bus.close()
        for node in nodes:
            node.client.execute_command("ACL", "DELUSER", USER)


async def test_settings_with_which_redis_may_lose_requests_are_named(guarded_url: str) -> None:
    admin = redis.Redis.from_url(guarded_url.replace(f"{USER}:{PASSWORD}@", ""))
    bus = RedisBus(guarded_url)  # a user who may not ask for CONFIG
    assert not await bus.settings_warnings()
    try:
        admin.config_set("maxmemory-policy", "allkeys-lru")
        admin.config_set("appendonly", "no")
        policy, append_only = await bus.settings_warnings()
    finally:
        admin.config_set("maxmemory-policy", "noeviction")
        admin.config_set("appendonly", "yes")
        admin.close()
        await bus.close()
    assert "allkeys-lru" in policy
    assert "noeviction" in policy
    assert "appendonly yes" in append_only


async def test_a_wrong_password_is_reported_as_such_and_not_shown(guarded_url: str) -> None:
    bus = RedisBus(guarded_url.replace(PASSWORD, "wrong-horse"))
    with pytest.raises(LoginRefused) as refused:
        await bus.check_server()
    assert "WRONGPASS" in str(refused.value) or "invalid username" in str(refused.value)
    assert "wrong-horse" not in str(refused.value)
    await bus.close()


@pytest.mark.parametrize(
    "url", ["http://user:secret@host/0", "redis://user:secret@host:port/0", "user:secret"]
)
def test_a_url_that_cannot_be_used_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(SettingsError) as refused:
        RedisBus(url)
    assert "REDIS_URL" in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("service", ["gateway", "gpu_worker"])
def test_every_service_names_a_bad_url_and_keeps_the_password_to_itself(service: str) -> None:
    command = [sys.executable, "-m", service, "--redis-url", "redis://user:secret@host:port/0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "REDIS_URL=" in done.stderr
    assert "secret" not in done.stderr


def test_a_bad_url_is_named_before_the_schedulers_port_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        url = "redis://user:secret@host:port/0"
        command = [sys.executable, "-m", "scheduler_svc", "--redis-url", url]
        command += ["--scheduler-metrics-port", port]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "REDIS_URL=" in done.stderr
    assert "secret" not in done.stderr


# ------------------------------------------------------------------------ TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of 127.0.0.1 that signs itself, and its key, in one file."""
    folder = tmp_path_factory.mktemp("tls")
    both = folder / "both.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1"
    subprocess.run(
        [
            *command.split(),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(folder / "key.pem"), "-out", str(folder / "certificate.pem")),
        ],
        check=True,
        capture_output=True,
    )
    both.write_text((folder / "certificate.pem").read_text() + (folder / "key.pem").read_text())
    return both


@asynccontextmanager
async def _tls_in_front(redis_url: str, certificate: Path) -> AsyncIterator[int]:
    """Port on which the server is reached over TLS."""
    target = urlsplit(redis_url)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        except (ConnectionError, ssl.SSLError):
            pass
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner = await asyncio.open_connection(target.hostname, target.port)
        await asyncio.gather(pump(reader, inner[1]), pump(inner[0], writer))

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()


async def test_the_bus_works_over_tls_as_a_user(guarded_url: str, certificate: Path) -> None:
    async with _tls_in_front(guarded_url, certificate) as port:
        login = f"{USER}:{PASSWORD}"
        bus = RedisBus(f"rediss://{login}@127.0.0.1:{port}/0?ssl_ca_certs={certificate}")
        await _use(bus)
        await bus.close()


async def test_a_server_without_a_valid_certificate_is_refused(
    guarded_url: str, certificate: Path
) -> None:
    async with _tls_in_front(guarded_url, certificate) as port:
        bus = RedisBus(f"rediss://{USER}:{PASSWORD}@127.0.0.1:{port}/0")
        with pytest.raises(BusUnavailable, match=r"(?i)certificate"):
            await bus.check_server()
        await bus.close()
