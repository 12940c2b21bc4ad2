"""The chat in a real browser, beside a gateway whose engine the test plays."""

import json

from benchmarks.page.browser import ENTER, ESCAPE, SHIFT, Browser
from shared.messages.endings import EndFlag
from shared.messages.requests import Abort, Attach, Submit
from tests.gateway.answers.tool_models import demo_tokenizer
from tests.gateway.conftest import MakeStage, Stage
from tests.gateway.event_streams import tokens_of
from tests.gateway.fake_engine import scores

KEY = "a-secret-key-of-this-test"


async def asked(stage: Stage, browser: Browser, text: str) -> Submit:
    """The request that the page makes of a message, accepted by the engine."""
    await browser.write("#prompt", text + ENTER)
    return await stage.engine.accept_next()


async def resumed(stage: Stage, submit: Submit, tokens: list[int]) -> None:
    """The engine lets a gateway look up the request, and then deliver it."""
    for _ in range(2):
        await stage.engine.accept_attach(await stage.engine.read_attach(), tokens, submit=submit)


async def check_copies(browser: Browser) -> None:
    """The request can be copied as programs, which do not show the key; no other tab has it."""
    await browser.run("navigator.clipboard.writeText = text => { window.copied = text; }")
    for number, parts in enumerate((["curl -N", "$PAGESTREAM_API_KEY"], ["OpenAI(", "seed=3,"])):
        await browser.run(
            "document.querySelectorAll('.about button')[1 + arguments[0]].click()", number
        )
        copied = await browser.run("return window.copied")
        assert all(part in copied for part in parts), copied
        assert KEY not in copied
    assert await browser.run("return [localStorage.length, document.cookie]") == [0, ""]


async def open_page(stage: Stage, browser: Browser) -> None:
    await browser.open(stage.url)
    await browser.until("return document.getElementById('model').value === 'demo'")


async def ended(browser: Browser) -> str:
    """What is written below the last answer, as soon as it has ended."""
    await browser.until("return document.getElementById('stop').hidden")
    numbers: str = await browser.run(
        "return [...document.querySelectorAll('.numbers')].at(-1).textContent"
    )
    return numbers


async def test_an_answer_streams_survives_a_lost_connection_and_a_reload_and_is_stopped(
    stage: Stage, browser: Browser
) -> None:
    await open_page(stage, browser)
    assert await browser.errors() == []
    hostile = "<img src=x onerror=alert(1)> two"
    parts = [tokens_of(stage, text) for text in (hostile, " three", " four")]
    submit = await asked(stage, browser, f"<b>bold</b>{SHIFT}{ENTER}{SHIFT}line")
    await stage.engine.generate(submit, parts[0], None)
    await browser.shows("<b>bold</b>\nline")
    await browser.shows(hostile)
    assert await browser.run("return document.querySelectorAll('#log b, #log img').length") == 0
    assert await browser.errors() == []

    for connection in list(stage.server.connections):  # it is lost
        connection.transport.abort()
    await resumed(stage, submit, parts[0])
    await stage.engine.generate(submit, parts[1], None)
    await browser.shows(f"{hostile} three")
    lost = await browser.errors()
    assert all("net::ERR" in error for error in lost), lost

    await browser.reload()
    so_far = parts[0] + parts[1]
    await resumed(stage, submit, so_far)
    await stage.engine.generate(submit, parts[2], None)
    await browser.shows(f"{hostile} three four")
    assert await browser.run("return document.querySelectorAll('.message').length") == 2

    await browser.write("#prompt", ESCAPE)
    assert "finish: stopped" in await ended(browser)
    so_far += parts[2]
    await stage.engine.accept_attach(await stage.engine.read_attach(), so_far, submit=submit)
    assert (await stage.engine.read_abort()).request_id == submit.request_id
    assert await browser.errors() == []

    await browser.write("#prompt", f"once more{ENTER}")
    submit = await stage.engine.read_submit()
    await browser.write("#prompt", ESCAPE)  # before the page has the stream's URL
    await stage.engine.accept(submit)
    message = await stage.engine.read()
    if isinstance(message, Attach):
        await stage.engine.accept_attach(message, [], submit=submit)
        message = await stage.engine.read_abort()
    assert isinstance(message, Abort)
    assert message.request_id == submit.request_id
    assert await ended(browser) == "finish: stopped"
    assert await browser.errors() == []


async def test_settings_reach_the_engine_and_scores_are_shown(
    make_stage: MakeStage, browser: Browser
) -> None:
    stage = await make_stage(api_key=KEY)
    await browser.open(stage.url)
    await browser.until("return document.activeElement.id === 'key'")
    await browser.write("#key", KEY + ENTER)
    await browser.until("return document.getElementById('model').value === 'demo'")
    refused = await browser.errors()
    assert len(refused) == 1, refused
    assert "401" in refused[0]
    for name, value in {
        "temperature": "0.5",
        "top_p": "0.9",
        "max_tokens": "7",
        "seed": "3",
    }.items():
        await browser.write(f"#{name}", value)
    await browser.write("#system", "Be brief.")
    await browser.click("#logprobs")
    submit = await asked(stage, browser, "Hello")
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.9, 7)
    assert (sampling.seed, sampling.num_logprobs) == (3, 5)
    assert "Be brief." in stage.tokenizer.decode(submit.prompt.tolist())
    first, *_, other = tokens_of(stage, "one two")
    row = submit.request_id
    await stage.engine.step(
        {row: first}, None, {row: scores(first, -0.25, {first: -0.25, other: -2.0})}
    )
    await browser.until("return document.querySelector('.token')")
    await stage.engine.step(
        {row: first}, {row: EndFlag.LENGTH}, {row: scores(first, -0.5, {first: -0.5})}
    )
    numbers = await ended(browser)
    assert "2 tokens" in numbers
    assert "tokens/s" in numbers
    assert "first token" in numbers
    await browser.run("document.querySelector('.token').focus()")
    tip = await browser.run("return document.getElementById('alternatives').innerText")
    assert "77.9 %" in tip
    assert "-2.000" in tip

    await check_copies(browser)

    await browser.run("document.querySelector('.about button').click()")  # regenerate
    again = await stage.engine.accept_next()
    assert again.prompt.tolist() == submit.prompt.tolist()
    row = again.request_id
    await stage.engine.step({row: other}, {row: EndFlag.LENGTH}, {row: scores(other, -0.5, {})})
    assert "1 tokens" in await ended(browser)
    await browser.shows(stage.tokenizer.decode([other]))
    assert await browser.run("return document.activeElement.id") == "prompt"
    assert await browser.run("return document.querySelectorAll('.message').length") == 2
    assert await browser.errors() == []


async def test_json_is_asked_for_and_a_tool_is_called_and_its_result_is_sent(
    make_stage: MakeStage, browser: Browser
) -> None:
    template = (
        "{% for one in messages %}{{ one.role }} {{ one.content }}"
        "{% for call in one.tool_calls or [] %} calls {{ call.function.arguments.a }}{% endfor %}|"
        "{% endfor %}{{ 'with tools' if tools }}"
    )
    stage = await make_stage(tokenizer=demo_tokenizer(template), tool_call_parser="hermes")
    await open_page(stage, browser)
    await browser.click("#formats summary")
    await browser.write("#schema", '["no object"]')
    await browser.write("#prompt", f"Hello{ENTER}")
    problem = await browser.run("return document.getElementById('schema').validationMessage")
    assert problem == "Expected an object."
    fill = "document.getElementById(arguments[0]).value = arguments[1]"
    await browser.run(fill, "schema", '{"type": "integer"}')
    submit = await asked(stage, browser, "")
    assert '"integer"' in submit.sampling.grammar
    await stage.engine.generate(submit, tokens_of(stage, "12"))
    await ended(browser)

    await browser.run(fill, "schema", "")
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    await browser.run(fill, "tools", json.dumps([tool]))
    submit = await asked(stage, browser, "Add")
    assert submit.sampling.grammar == ""
    calls = [f'<tool_call>{{"name": "add", "arguments": {{"a": {n}}}}}</tool_call>' for n in (1, 2)]
    await stage.engine.generate(submit, tokens_of(stage, "".join(calls)), EndFlag.STOP)
    assert "finish: tool_calls" in await ended(browser)
    await browser.shows('add({"a": 2})')
    assert await browser.run(
        "return document.getElementById('prompt').placeholder.slice(0, 13)"
    ) == ("Result of add")
    await browser.write("#prompt", f"three{ENTER}")
    submit = await asked(stage, browser, "four")
    prompt = stage.tokenizer.decode(submit.prompt.tolist())
    assert prompt.endswith(" calls 1 calls 2|tool three|tool four|with tools")
    await stage.engine.generate(submit, tokens_of(stage, "Seven"))
    await ended(browser)
    await browser.shows("Seven")
    assert await browser.errors() == []


async def test_controls_have_names_and_fit_narrow_and_wide_windows_light_and_dark(
    stage: Stage, browser: Browser
) -> None:
    await open_page(stage, browser)
    submit = await asked(stage, browser, "word " * 20 + "x" * 120)
    await stage.engine.generate(submit, tokens_of(stage, "y" * 120))
    await ended(browser)
    for width in (400, 1600):
        await browser.resize(width, 800)
        sizes = await browser.run(
            "return [document.documentElement.scrollWidth, innerWidth,"
            " document.getElementById('send').getBoundingClientRect().bottom <= innerHeight,"
            " document.getElementById('log').clientHeight]"
        )
        assert sizes[0] <= sizes[1] == width
        assert sizes[2], "the button lies within the window"
        assert sizes[3] >= 150, "the conversation has a place"
    unnamed = await browser.run(
        "return [...document.querySelectorAll('input, textarea, select, button')]"
        ".filter(one => !one.labels?.length && !one.ariaLabel && !one.textContent.trim())"
        ".map(one => one.id)"
    )
    assert unnamed == []
    names = {"#prompt": "Message", "#model": "Model", "#temperature": "Temperature"}
    assert {selector: await browser.name_of(selector) for selector in names} == names
    colours = []
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await browser.devtools("Emulation.setEmulatedMedia", features=features)
        colours.append(await browser.run("return getComputedStyle(document.body).backgroundColor"))
    assert colours[0] == "rgb(255, 255, 255)" != colours[1]
    assert await browser.errors() == []
