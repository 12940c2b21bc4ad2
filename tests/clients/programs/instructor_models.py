"""instructor, with the client of openai-python."""

from typing import Any, Literal

import instructor
import openai
from pydantic import BaseModel, Field

QUESTION: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]


class Forecast(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Paris"]
    days: int = Field(ge=1, le=9)


def _client(server: Any, mode: instructor.Mode) -> Any:
    plain = openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0)
    return instructor.from_openai(plain, mode=mode)


def _ask(server: Any, mode: instructor.Mode, **options: Any) -> Any:
    return _client(server, mode).chat.completions.create(
        model=server.model, messages=QUESTION, max_retries=1, seed=1, **options
    )


def mode_tools(server: Any) -> None:
    """create, Mode.TOOLS"""
    assert isinstance(_ask(server, instructor.Mode.TOOLS, response_model=Forecast), Forecast)


def mode_tools_strict(server: Any) -> None:
    """create, Mode.TOOLS_STRICT"""
    assert isinstance(_ask(server, instructor.Mode.TOOLS_STRICT, response_model=Forecast), Forecast)


def mode_json_schema(server: Any) -> None:
    """create, Mode.JSON_SCHEMA"""
    assert isinstance(_ask(server, instructor.Mode.JSON_SCHEMA, response_model=Forecast), Forecast)


def mode_responses(server: Any) -> None:
    """responses.create by create, Mode.RESPONSES_TOOLS"""
    plain = openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0)
    client = instructor.from_openai(plain, mode=instructor.Mode.RESPONSES_TOOLS)
    found = client.responses.create(
        model=server.model, input="The weather in Oslo?", response_model=Forecast, max_retries=1
    )
    assert isinstance(found, Forecast)


def mode_partial(server: Any) -> None:
    """create_partial, Mode.TOOLS"""
    parts = list(
        _client(server, instructor.Mode.TOOLS).chat.completions.create_partial(
            model=server.model, messages=QUESTION, response_model=Forecast, seed=1
        )
    )
    assert parts[-1].city in ("Oslo", "Paris")


def mode_iterable(server: Any) -> None:
    """create_iterable, Mode.JSON_SCHEMA"""
    found = _client(server, instructor.Mode.JSON_SCHEMA).chat.completions.create_iterable(
        model=server.model, messages=QUESTION, response_model=Forecast, seed=2, max_tokens=200
    )
    assert all(isinstance(each, Forecast) for each in found)
