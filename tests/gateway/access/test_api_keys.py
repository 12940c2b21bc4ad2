"""Who is let in."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.access.api_keys import ApiKeys
from gateway.access.authentication import OPEN_PATHS
from gateway.access.priorities import PriorityRange
from shared.errors import SettingsError
from tests.gateway.conftest import MakeStage, Stage

ROOT = Path(__file__).parents[3]
KEY, OTHER = "ps-one-key-of-alice", "ps-another-key-of-bob"
NEWER = "ps-the-newer-key-of-alice"


def line(name: str, key: str) -> str:
    return f"{name} sha256:{hashlib.sha256(key.encode()).hexdigest()}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# who may come in\n\n" + line("alice", KEY) + line("bob", OTHER))
    return path


@pytest.fixture
def file_of_both(file: Path) -> Path:
    """Alice has a newer key, too."""
    file.write_text(file.read_text() + line("alice", NEWER))
    return file


def test_a_known_key_is_its_owners(file: Path) -> None:
    keys = ApiKeys(str(file))
    assert keys.tenant_of(f"Bearer {KEY}") == "alice"
    assert keys.tenant_of(f"bearer  {OTHER}") == "bob"


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", f"Basic {KEY}", KEY, f"Bearer {KEY}x", "Bearer \udcff"]
)
def test_no_other_key_is_valid(file: Path, header: str) -> None:
    assert ApiKeys(str(file)).tenant_of(header) is None


def test_no_key_is_held_in_plain_text(file: Path) -> None:
    keys = ApiKeys(str(file), "the key of the environment")
    assert keys.tenant_of("Bearer the key of the environment") == "default"
    assert "the key of" not in repr(keys._keys) + repr(vars(keys))


def test_without_keys_no_key_is_required() -> None:
    assert not ApiKeys().are_required


def test_a_name_may_have_two_keys_while_one_replaces_the_other(file: Path) -> None:
    keys = ApiKeys(str(file))
    file.write_text(line("alice", KEY) + line("alice", "ps-the-next-key-of-alice"))
    assert keys.reload() == 2
    assert keys.tenant_of("Bearer ps-the-next-key-of-alice") == "alice"
    assert keys.tenant_of(f"Bearer {OTHER}") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "no key"),
        ("# nobody\n", "no key"),
        (f"alice {KEY}\n", "line 1"),
        (line("alice", KEY) + f"b ob sha256:{'0' * 64}\n", "line 2"),
    ],
)
def test_a_file_that_cannot_be_used_keeps_the_keys_before(
    file: Path, text: str, expected: str
) -> None:
    keys = ApiKeys(str(file))
    file.write_text(text)
    with pytest.raises(SettingsError, match=expected) as refused:
        keys.reload()
    assert KEY not in str(refused.value)
    assert keys.tenant_of(f"Bearer {KEY}") == "alice"
    with pytest.raises(SettingsError, match=expected):
        ApiKeys(str(file))


def test_a_missing_file_and_a_short_key_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        ApiKeys(str(tmp_path / "none"))
    with pytest.raises(SettingsError, match="at least 16") as refused:
        ApiKeys(plain="hunter2")
    assert "hunter2" not in str(refused.value)


def test_the_command_makes_keys_that_are_let_in(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gateway.access.api_keys", "carol"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    path = tmp_path / "keys"
    path.write_text(made.stdout)
    key = made.stderr.strip().rpartition(" ")[2]
    assert ApiKeys(str(path)).tenant_of(f"Bearer {key}") == "carol"
    assert key not in made.stdout


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["--help"], 0, "usage: python -m gateway.access.api_keys NAME >> FILE"),
        ([], 2, "required: NAME"),
        (["two", "names"], 2, "unrecognized arguments: names"),
        (["b ob"], 2, "'b ob' is no name"),
    ],
)
def test_the_command_makes_no_key_where_none_is_meant(
    words: list[str], code: int, expected: str
) -> None:
    command = [sys.executable, "-m", "gateway.access.api_keys", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert expected in (done.stderr if code else done.stdout)
    assert "sha256:" not in done.stdout


# ----------------------------------------------------------------- over HTTP


async def test_every_path_but_liveness_and_the_docs_page_requires_a_key(
    make_stage: MakeStage, file: Path
) -> None:
    stage = await make_stage(api_keys=str(file))
    allowed = {"Authorization": f"Bearer {KEY}"}
    described = await stage.http.get("/openapi.json", headers=allowed)
    paths = [path for path in described.json()["paths"] if path not in OPEN_PATHS]
    assert {"/v1/completions", "/metrics", "/health/ready", "/prefixes"} <= set(paths)
    for path in [*paths, "/openapi.json", "/nowhere"]:
        for method in ("GET", "POST"):
            refused = await stage.http.request(method, path)
            assert refused.status_code == 401, path
            assert refused.headers["www-authenticate"] == "Bearer"
            assert refused.headers["x-request-id"]
            error = refused.json()["error"]
            if path.startswith("/v1/messages"):
                assert error["type"] == "authentication_error"
                continue
            assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
    assert (await stage.http.get("/health/live")).status_code == 200
    assert (await stage.http.get("/docs")).status_code == 200
    wrong = await stage.http.get("/v1/models", headers={"Authorization": "Bearer wrong"})
    assert wrong.status_code == 401
    assert "not known" in wrong.json()["error"]["message"]


async def test_the_name_of_a_key_goes_with_its_requests(make_stage: MakeStage, file: Path) -> None:
    stage = await make_stage(api_keys=str(file))
    stage.answer_text("Hi")
    for key in (KEY, OTHER):
        stage.http.headers["Authorization"] = f"Bearer {key}"
        assert (await stage.complete()).status_code == 200
        assert (await stage.chat(stream=True)).status_code == 200
    tenants = [message.tenant for message in stage.engine.received]  # type: ignore[attr-defined]
    assert tenants == ["alice", "alice", "bob", "bob"]


async def test_a_stream_is_its_tenants_even_with_a_new_key(
    make_stage: MakeStage, file_of_both: Path
) -> None:
    stage = await make_stage(api_keys=str(file_of_both))
    stage.http.headers["Authorization"] = f"Bearer {KEY}"
    begun = stage.spawn(stage.complete(stream=True, stream_resume=True))
    submit = await stage.engine.accept_next()
    [token] = stage.tokenizer.encode("a", add_special_tokens=False)
    await stage.engine.generate(submit, [token])
    url = (await begun).headers["x-stream-url"]
    refused = await stage.http.get(url, headers={"Authorization": f"Bearer {OTHER}"})
    assert refused.status_code == 404
    resuming = stage.spawn(stage.http.get(url, headers={"Authorization": f"Bearer {NEWER}"}))
    looked_up = await stage.engine.read_attach()
    await stage.engine.accept_attach(looked_up, [token], submit=submit, ended={0: "length"})
    attach = await stage.engine.read_attach()
    assert attach.submit is not None
    assert attach.submit.tenant == "alice"
    await stage.engine.accept_attach(attach, [token], ended={0: "length"})
    assert (await resuming).status_code == 200


async def test_the_official_client_presents_its_key(make_stage: MakeStage) -> None:
    stage = await make_stage(api_key=KEY)
    client = stage.openai.with_options(api_key=KEY)
    assert [model.id async for model in client.models.list()] == ["demo"]


# ------------------------------------------------------------------ priorities


@pytest.mark.parametrize(
    ("text", "low", "high", "default"),
    [
        ("-10..10", -10, 10, 0),
        ("5..9", 5, 9, 5),
        ("-9..-5", -9, -5, -5),
        ("-2147483648..2147483647", -(2**31), 2**31 - 1, 0),
        ("none", 0, 0, 0),
    ],
)
def test_a_range_of_priorities_is_read(text: str, low: int, high: int, default: int) -> None:
    found = PriorityRange.parse(text)
    assert (found.low, found.high, found.default) == (low, high, default)


@pytest.mark.parametrize("text", ["", "5", "1-5", "9..5", "0..2147483648", "a..b", "1..2..3"])
def test_what_is_no_range_of_priorities_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected"):
        PriorityRange.parse(text)
    path = tmp_path / "keys"
    path.write_text(line("alice", KEY).strip() + f" priority={text}\n")
    with pytest.raises(SettingsError, match="line 1"):
        ApiKeys(str(path))


async def priorities(stage: Stage, key: str | None, *asked: int | None) -> list[int | None]:
    """The priority that each request has, None for those that are refused."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    stage.answer_text("Hi")
    found: list[int | None] = []
    for number, priority in enumerate(asked):
        body = {"model": "demo", "prompt": "Hi", "priority": priority}
        if number % 2:
            messages = [{"role": "user", "content": "Hi"}]
            body = {"model": "demo", "messages": messages, "priority": priority}
        path = "/v1/chat/completions" if number % 2 else "/v1/completions"
        response = await stage.http.post(path, json=body, headers=headers)
        if response.status_code == 200:
            found.append(stage.engine.received[-1].priority)  # type: ignore[attr-defined]
        else:
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, "priority")
            assert f"priority={priority}" in error["message"]
            found.append(None)
    return found


async def test_a_key_may_use_the_priorities_of_its_line_and_by_default_none(
    make_stage: MakeStage, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    batch = line("batch", NEWER).strip() + " priority=5..9\n"
    path.write_text(line("alice", KEY).strip() + " priority=-3..4\n" + line("bob", OTHER) + batch)
    stage = await make_stage(api_keys=str(path))
    lowest = -(2**31)
    assert await priorities(stage, KEY, None, 0, -3, 4, -4, 5, lowest) == [
        *(0, 0, -3, 4),
        *(None, None, None),
    ]
    assert await priorities(stage, OTHER, None, 0, 1, -1, lowest) == [0, 0, None, None, None]
    assert await priorities(stage, NEWER, None, 0, 5, 9, 10) == [5, None, 5, 9, None]
    body = {"model": "demo", "prompt": "Hi", "priority": -4}
    for key, expected in (
        (KEY, "this API key allows -3 to 4"),
        (OTHER, "this API key allows 0 only"),
    ):
        headers = {"Authorization": f"Bearer {key}"}
        refused = await stage.http.post("/v1/completions", json=body, headers=headers)
        assert expected in refused.json()["error"]["message"]


async def test_one_setting_allows_priorities_to_all_other_keys(
    make_stage: MakeStage, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    path.write_text(line("alice", KEY).strip() + " priority=none\n" + line("bob", OTHER))
    stage = await make_stage(api_keys=str(path), api_key=NEWER, priorities="-1..1")
    assert await priorities(stage, KEY, 0, 1) == [0, None]
    assert await priorities(stage, OTHER, -1, 1, 2) == [-1, 1, None]
    assert await priorities(stage, NEWER, -1, 1, 2) == [-1, 1, None]


async def test_without_keys_any_priority_is_allowed_unless_restricted(
    make_stage: MakeStage,
) -> None:
    stage = await make_stage()
    assert await priorities(stage, None, None, -(2**31), 2**31 - 1) == [0, -(2**31), 2**31 - 1]
    stage = await make_stage(priorities="0..5")
    assert await priorities(stage, None, None, -1, 5) == [0, None, 5]
