"""The page's files over HTTP: headers, keys, and what is not served."""

import re

import pytest

from gateway.ui.page import UI_PATHS
from tests.gateway.conftest import MakeStage, Stage, check_error

POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "img-src": "'self' data:",
    "frame-ancestors": "'none'",
    "base-uri": "'none'",
    "form-action": "'none'",
}
MEDIA_TYPES = {"css": "text/css", "js": "text/javascript", "/": "text/html"}


async def test_every_file_has_the_strict_policy_and_its_own_type(stage: Stage) -> None:
    assert {"/", "/ui/style.css", "/ui/chat.js"} <= set(UI_PATHS)
    for path in UI_PATHS:
        response = await stage.http.get(path)
        assert response.status_code == 200, path
        policy = response.headers["content-security-policy"]
        assert dict(part.strip().split(" ", 1) for part in policy.split(";")) == POLICY
        assert response.headers["x-content-type-options"] == "nosniff"
        expected = MEDIA_TYPES[path.rpartition(".")[2]]
        assert response.headers["content-type"] == f"{expected}; charset=utf-8", path


async def test_the_page_has_no_inline_code_and_loads_its_own_files_alone(stage: Stage) -> None:
    page = (await stage.http.get("/")).text
    loaded = re.findall(r'<(?:script|link)[^>]* (?:src|href)="([^"]+)"', page)
    assert [url for url in loaded if not url.startswith("data:")]
    for url in loaded:
        assert url.startswith("data:image/svg+xml,") or f"/{url}" in UI_PATHS, url
    assert not re.findall(r"<style|<script(?![^>]* src=)| style=| on\w+=", page)
    for path in UI_PATHS:
        text = (await stage.http.get(path)).text
        assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", text), path
        urls = [url for url in re.findall(r"https?://[^\s'\"`]+", text) if "www.w3.org" not in url]
        assert not urls, f"{path} names other hosts"
        for module in re.findall(r'from "\./([^"]+)"', text):
            assert f"/ui/{module}" in UI_PATHS


async def test_unchanged_files_are_not_sent_again(stage: Stage) -> None:
    first = await stage.http.get("/ui/chat.js")
    etag = first.headers["etag"]
    for known in (etag, f'W/"other", W/{etag}'):
        again = await stage.http.get("/ui/chat.js", headers={"If-None-Match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == etag
    other = await stage.http.get("/ui/chat.js", headers={"If-None-Match": '"other"'})
    assert other.content == first.content
    head = await stage.http.head("/")
    assert (head.status_code, head.content) == (200, b"")
    assert (await stage.http.post("/")).status_code == 405


@pytest.mark.parametrize(
    "path",
    ["/ui", "/ui/", "/ui/index.html", "/ui/page.py", "/ui/..%2fpage.py", "/ui/%2e%2e/page.py"],
)
async def test_no_other_path_reaches_a_file(stage: Stage, path: str) -> None:
    check_error(await stage.http.get(path), 404)


async def test_files_need_no_key_and_calls_do(make_stage: MakeStage) -> None:
    stage = await make_stage(api_key="a-secret-key-of-this-test")
    for path in UI_PATHS:
        response = await stage.http.get(path)
        assert response.status_code == 200
        assert "a-secret-key" not in response.text
    assert (await stage.http.get("/v1/models")).status_code == 401
    assert (await stage.http.get("/ui/page.py")).status_code == 401


async def test_without_the_page_its_paths_do_not_exist(make_stage: MakeStage) -> None:
    stage = await make_stage(ui=False)
    for path in UI_PATHS:
        check_error(await stage.http.get(path), 404)
    assert (await stage.http.get("/docs")).status_code == 200
