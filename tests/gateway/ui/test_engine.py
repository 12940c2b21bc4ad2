"""The engine's view in a real browser, beside a scheduler core whose logs it shows."""

import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.page.browser import Browser
from shared.bus.memory import MemoryBus
from tests.gateway.conftest import MakeStage, Stage
from tests.gateway.ui.logged_engine import LoggedEngine
from tests.support.requests import submit
from tests.support.walks.recorded import record


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus(lambda: 1_000)


@pytest.fixture
async def stage(make_stage: MakeStage, bus: MemoryBus, tmp_path: Path) -> Stage:
    record(tmp_path / "made-elsewhere", seed=3)
    return await make_stage(bus=bus, ui_recordings=str(tmp_path))


async def shown(browser: Browser, step: int) -> dict[str, Any]:
    """The numbers of the view, once it shows a step."""
    script = (
        "const d = document.getElementById('engine').dataset; return d.step == arguments[0] && d"
    )
    found: dict[str, Any] = await browser.until(script, step)
    return found


async def check_gauges(browser: Browser, logged: LoggedEngine) -> None:
    """The view has the numbers that the scheduler's gauges are set to."""
    stats = logged.engine.core.stats()
    found = await shown(browser, logged.engine.core.planned_step)
    assert int(found["used"]) == stats.num_used_blocks
    assert int(found["tokens"]) == stats.num_kv_tokens
    assert int(found["saved"]) == stats.num_shared_blocks
    assert int(found["running"]) == stats.num_running
    waiting = sum(int(found[name]) for name in ("waiting", "preempted", "swapped"))
    assert waiting == stats.num_waiting


async def test_the_map_shows_what_the_gauges_have_under_load_and_at_rest(
    stage: Stage, bus: MemoryBus, browser: Browser
) -> None:
    logged = LoggedEngine(bus, 5_000_000)
    for number in range(20):
        prompt = [3] * 8 + [number + 1] * (1 + number % 5)
        logged.engine.ask(submit(f"r{number}", prompt, num_choices=1 + number % 2, max_tokens=20))
    logged.engine.snapshot()
    await logged.write()
    await browser.open(f"{stage.url}/#/engine")
    for _ in range(12):
        logged.engine.step()
        await logged.write()
    await check_gauges(browser, logged)
    while logged.engine.step():
        pass
    logged.engine.snapshot()
    await logged.write()
    await check_gauges(browser, logged)
    cached = logged.engine.core.stats().num_cached_blocks
    await browser.until(
        "return document.getElementById('engine').dataset.cached == arguments[0]", cached
    )
    found = await shown(browser, logged.engine.core.planned_step)
    assert int(found["found"]) > 10
    assert int(found["evicted"]) > 10
    words = await browser.until("return document.getElementById('reuse').textContent")
    assert re.fullmatch(r"last second: prefix hits \d+ · evictions \d+", words)
    assert await browser.errors() == []


async def test_a_block_is_described_and_reached_by_keyboard_and_the_table_says_the_same(
    stage: Stage, bus: MemoryBus, browser: Browser
) -> None:
    logged = LoggedEngine(bus, 5_000_000)
    logged.engine.ask(submit("request-of-mine", [1] * 9, max_tokens=30))
    logged.engine.step()
    logged.engine.snapshot()
    await logged.write()
    await browser.open(f"{stage.url}/#/engine")
    await shown(browser, logged.engine.core.planned_step)
    await browser.run("document.getElementById('map').focus()")
    await browser.shows(
        "Block 0 · in use · request #1 (request-of-mine) · positions 8", "block-detail"
    )
    await browser.write("#map", "\ue014")  # the right arrow
    await browser.shows("Block 1 ·", "block-detail")
    await browser.run("document.querySelector('#request-list summary').click()")
    await browser.until("return document.querySelectorAll('#request-rows tr').length === 1")
    row = await browser.run("return document.querySelector('#request-rows tr').innerText")
    assert row.split("\t")[1:3] == ["decode", "9"]
    await browser.run("document.querySelector('#request-rows button').click()")
    await browser.shows("9 prompt tokens", "request-detail")
    assert "KV blocks: 3 of 24 in use" in await browser.name_of("#map")
    for width in (400, 1600):
        await browser.resize(width, 800)
        sizes = await browser.run("return [document.documentElement.scrollWidth, innerWidth]")
        assert sizes == [width, width]
    await browser.click("#tab-chat")
    await browser.until("return document.getElementById('engine').hidden")
    assert await browser.run("return location.hash") == ""
    assert await browser.errors() == []


async def test_the_time_machine_shows_a_preemption_that_a_small_pool_forced_and_what_if(
    stage: Stage, bus: MemoryBus, browser: Browser
) -> None:
    logged = LoggedEngine(bus, 5_000_000, num_blocks=10, num_host_blocks=0)
    engine = logged.engine
    engine.snapshot()
    for number in range(6):
        engine.ask(submit(f"request{number}", [number + 1] * 9, max_tokens=15))
        engine.step()
    preempted_ms = 0
    while engine.step():
        if (
            not preempted_ms
            and engine.core.stats().num_waiting
            and engine.core._planner.queues.preempted
        ):
            preempted_ms = engine.now_ms
    engine.snapshot()
    await logged.write()
    await browser.open(f"{stage.url}/#/engine")
    await shown(browser, engine.core.planned_step)
    await browser.until("return document.getElementById('moment').max > 1")
    await browser.run(
        "const m = document.getElementById('moment'); m.value = arguments[0];"
        "m.dispatchEvent(new Event('input'))",
        preempted_ms + 30,
    )
    await browser.until("return document.getElementById('engine').dataset.past")
    await browser.shows("past", "engine-live")
    await browser.until(
        "return [...document.querySelectorAll('#engine-numbers div')]"
        ".some(one => one.innerText.match(/Preempted\\s+[1-9]/))"
    )
    number = await browser.run(
        "const t = document.getElementById('timeline'); t.focus(); return t.tabIndex"
    )
    assert number == 0
    for _ in range(6):  # the arrow key chooses one request after the other
        await browser.write("#timeline", "\ue015")
        text = await browser.run("return document.getElementById('request-detail').innerText")
        if "last running request by rank" in text:
            break
    assert "last running request by rank" in text
    assert "Explain its life" in text
    await browser.run("document.querySelector('#what-if summary').click()")
    await browser.until("return document.querySelector('[name=num_blocks]').value === '20'")
    await browser.run("document.querySelector('[name=num_blocks]').value = 60")
    await browser.run("document.getElementById('what-if-form').requestSubmit()")
    ran = await browser.until("return document.getElementById('engine').dataset.whatIf")
    before, after = map(int, ran.split(","))
    assert before > after == 0
    await browser.click("#to-live")
    await browser.shows("live", "engine-live")
    assert await browser.errors() == []


async def test_a_recording_is_chosen_beside_the_slider_and_left_again(
    stage: Stage, bus: MemoryBus, browser: Browser
) -> None:
    logged = LoggedEngine(bus, 5_000_000)
    logged.engine.snapshot()
    await logged.write()
    await browser.open(f"{stage.url}/#/engine")
    await browser.shows("live", "engine-live")
    choose = (
        "const s = document.getElementById('recording'); s.focus(); s.value = arguments[0];"
        "s.dispatchEvent(new Event('change'));"
        "return [document.activeElement === s, s.labels.length]"
    )
    await browser.until("return !document.getElementById('recording-choice').hidden")
    assert await browser.run(choose, "made-elsewhere") == [True, 1]
    await browser.shows("past", "engine-live")
    await browser.until("return document.getElementById('moment').max < 1000")
    await browser.until(
        "return document.getElementById('map').getAttribute('aria-label').includes(' of 40 in use')"
    )
    assert await browser.run(choose, "") == [True, 1]
    await browser.shows("live", "engine-live")
    await browser.until("return document.getElementById('moment').max > 5_000_000")
    assert await browser.errors() == []
