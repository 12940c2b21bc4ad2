"""Chat templates on threads: a template that takes too long is interrupted, and no other one."""

import asyncio
import threading
import time
from contextlib import suppress
from functools import partial

import pytest

from gateway.http.errors import ApiError
from gateway.prompts.control_tokens import TemplateRefused
from gateway.prompts.template_threads import TemplateThreads


async def test_templates_that_find_no_thread_are_refused() -> None:
    threads = TemplateThreads(0.05)
    release = threading.Event()
    stuck = [asyncio.ensure_future(threads.run(release.wait)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ApiError) as caught:
        await threads.run(lambda: 1)
    assert caught.value.status == 429
    for hanging in stuck:
        with pytest.raises(TemplateRefused):
            await hanging
    release.set()
    assert await threads.run(lambda: 1) == 1
    threads.close()


async def test_an_interruption_never_reaches_the_next_template() -> None:
    threads = TemplateThreads(0.002)

    def spin(until_s: float) -> int:
        while time.monotonic() < until_s:
            pass
        return 1

    for turn in range(100):
        until_s = time.monotonic() + 0.0015 + turn * 1e-5
        with suppress(TemplateRefused, ApiError):
            assert await threads.run(partial(spin, until_s)) == 1
    threads.close()


async def test_a_thread_is_free_again_if_its_template_swallowed_the_interruption() -> None:
    threads = TemplateThreads(0.05)

    def swallow() -> None:  # as code does that Python runs in between, such as a destructor
        with suppress(BaseException):
            while True:
                pass

    for _ in range(2):
        with pytest.raises(TemplateRefused):
            await threads.run(swallow)
    async with asyncio.timeout(10):
        while True:
            with suppress(ApiError):
                assert await threads.run(lambda: 1) == 1
                break
    threads.close()
