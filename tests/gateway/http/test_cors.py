"""Pages of other origins."""

import pytest

from gateway.settings import GatewaySettings
from shared.errors import SettingsError
from shared.settings import load
from tests.gateway.conftest import MakeStage, Stage

PAGE = "https://chat.example.org"
KEY = "k" * 20
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang,last-event-id",
}


async def test_no_origin_is_allowed_by_default(stage: Stage) -> None:
    answer = await stage.http.options("/v1/completions", headers=PREFLIGHT)
    assert answer.status_code == 405
    stage.answer_text("Hi")
    response = await stage.http.get("/v1/models", headers={"Origin": PAGE})
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("origins", [PAGE, f"http://localhost:3000,{PAGE}", "*"])
async def test_a_preflight_needs_no_key_and_calls_do(make_stage: MakeStage, origins: str) -> None:
    stage = await make_stage(cors_origins=origins, api_key=KEY)
    allowed = "*" if origins == "*" else PAGE
    asked = await stage.http.options("/v1/chat/completions", headers=PREFLIGHT)
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == allowed
    methods = asked.headers["access-control-allow-methods"].split(", ")
    assert {"GET", "POST", "DELETE"} <= set(methods)
    assert "x-stainless-lang" in asked.headers["access-control-allow-headers"]
    refused = await stage.http.get("/v1/models", headers={"Origin": PAGE})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == allowed  # the page may read why
    stage.answer_text("Hi")
    body = {"model": "demo", "prompt": "Hi", "stream": True, "stream_resume": True}
    headers = {"Origin": PAGE, "Authorization": f"Bearer {KEY}"}
    stream = await stage.http.post("/v1/completions", json=body, headers=headers)
    assert stream.status_code == 200
    assert stream.headers["access-control-allow-origin"] == allowed
    exposed = {name.strip() for name in stream.headers["access-control-expose-headers"].split(",")}
    assert {"X-Stream-URL", "X-Request-Id", "Retry-After"} <= exposed
    assert "access-control-allow-credentials" not in stream.headers


async def test_other_origins_are_not_allowed(make_stage: MakeStage) -> None:
    stage = await make_stage(cors_origins=PAGE)
    other = {**PREFLIGHT, "Origin": "https://evil.example.org"}
    assert (await stage.http.options("/v1/completions", headers=other)).status_code == 400
    response = await stage.http.get("/v1/models", headers=other)
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("text", ["chat.example.org", "https://a.org/path", "https://a.org,", ""])
def test_what_is_no_origin_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="cors-origins"):
        load(GatewaySettings, {"model": "demo", "cors_origins": text}, {})
