"""A headless Chromium, driven by WebDriver commands: JSON over HTTP, as W3C has them."""

import asyncio
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from shared.errors import PageStreamError

_FLAGS = (
    "--headless",
    "--no-sandbox",  # root may not have one
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--renderer-process-limit=1",
)
_PATIENCE_S = 10.0
_START_S = 60.0
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the name that WebDriver gives to references
ENTER, ESCAPE, SHIFT = "\ue007", "\ue00c", "\ue008"


class NoBrowser(PageStreamError):
    """There is no Chromium with a driver on this machine."""


class Browser:
    """One window.

    Args:
        http: its base URL is the WebDriver session's.
    """

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def command(self, method: str, path: str, **body: Any) -> Any:
        """One WebDriver command; returns its value."""
        json = body if method == "POST" else None
        answer = await self._http.request(method, path, json=json)
        assert answer.status_code == 200, answer.text
        return answer.json()["value"]

    async def open(self, url: str) -> None:
        await self.command("POST", "/url", url=url)

    async def reload(self) -> None:
        await self.command("POST", "/refresh")

    async def run(self, script: str, *args: Any) -> Any:
        """What a function body returns in the page."""
        return await self.command("POST", "/execute/sync", script=script, args=list(args))

    async def resize(self, width: int, height: int) -> None:
        """Make the page's viewport so large, narrower than windows can be."""
        sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.devtools("Emulation.setDeviceMetricsOverride", **sizes)

    async def devtools(self, name: str, **params: Any) -> Any:
        """One command of Chromium's own protocol."""
        return await self.command("POST", "/goog/cdp/execute", cmd=name, params=params)

    async def element(self, selector: str) -> str:
        found = await self.command("POST", "/element", using="css selector", value=selector)
        identity: str = found[_ELEMENT]
        return identity

    async def write(self, selector: str, text: str) -> None:
        """Press the keys of a text in an element."""
        await self.command("POST", f"/element/{await self.element(selector)}/value", text=text)

    async def click(self, selector: str) -> None:
        await self.command("POST", f"/element/{await self.element(selector)}/click")

    async def name_of(self, selector: str) -> str:
        """What a screen reader calls an element."""
        identity = await self.element(selector)
        name: str = await self.command("GET", f"/element/{identity}/computedlabel")
        return name

    async def until(self, script: str, *args: Any) -> Any:
        """Wait until a function body returns something true in the page."""
        deadline = time.monotonic() + _PATIENCE_S
        while not (found := await self.run(script, *args)):
            shown = await self.run("return document.body.innerText")
            assert time.monotonic() < deadline, f"waited in vain for {script} of {args}:\n{shown}"
            await asyncio.sleep(0.02)
        return found

    async def shows(self, text: str, element: str = "log") -> None:
        """Wait until the conversation, or another element, has this text."""
        shown = "return document.getElementById(arguments[1]).textContent.includes(arguments[0])"
        await self.until(shown, text, element)

    async def errors(self) -> list[str]:
        """What the page has written to the console since the last call, warnings and worse."""
        entries = await self.command("POST", "/se/log", type="browser")
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]


def chromium() -> tuple[str, str]:
    """The paths of a Chromium and its driver.

    Raises:
        NoBrowser: there is none.
    """
    driver = shutil.which("chromedriver")
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if driver is None or browser is None:
        raise NoBrowser("chromium and chromedriver are not on PATH (Debian: chromium-driver)")
    return browser, driver


@contextmanager
def running_browser(folder: Path) -> Iterator[str]:
    """A browser with a fresh profile; yields the URL of its WebDriver session.

    Args:
        folder: for its files, outside of which it writes nothing.

    Raises:
        NoBrowser: there is none.
    """
    browser, driver = chromium()
    process = subprocess.Popen(
        [driver, "--port=0"],
        stdout=subprocess.PIPE,
        env={"HOME": str(folder), "TMPDIR": str(folder), "PATH": "/usr/bin:/bin"},
    )
    try:
        assert process.stdout is not None
        while not (found := re.search(rb"successfully on port (\d+)", process.stdout.readline())):
            assert process.poll() is None, "chromedriver ended"
        options = {"binary": browser, "args": [*_FLAGS, f"--user-data-dir={folder / 'profile'}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        sessions = f"http://127.0.0.1:{int(found[1])}/session"
        with httpx.Client(timeout=_START_S, trust_env=False) as http:
            body = {"capabilities": {"alwaysMatch": wanted}}
            answer = http.post(sessions, json=body).json()["value"]
            assert "sessionId" in answer, answer
            url = f"{sessions}/{answer['sessionId']}"
            try:
                yield url
            finally:
                http.delete(url)  # ends the browser, which would hold the driver's output open
    finally:
        process.terminate()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
