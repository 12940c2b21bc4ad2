"""One browser for all tests of the page."""

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from benchmarks.page.browser import Browser, NoBrowser, running_browser


@pytest.fixture(scope="session")
def session_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    try:
        with running_browser(tmp_path_factory.mktemp("browser")) as url:
            yield url
    except NoBrowser as error:
        pytest.skip(str(error))


@pytest.fixture
async def browser(session_url: str) -> AsyncIterator[Browser]:
    """A window that has kept nothing: each gateway has a port, and so an origin, of its own."""
    async with httpx.AsyncClient(base_url=session_url, timeout=60, trust_env=False) as http:
        browser = Browser(http)
        await browser.open("about:blank")
        await browser.errors()
        yield browser
