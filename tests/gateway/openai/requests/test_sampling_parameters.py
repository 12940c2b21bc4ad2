"""Fields of bodies follow from the table of sampling parameters."""

import json
from typing import Any

import pytest

from gateway.http.errors import ApiError
from gateway.openai.requests.beam_parameters import beam_params
from gateway.openai.requests.schema import ChatBody, CompletionBody, parse_body
from shared.sampling import PARAMETERS, Parameter

NUMBERS = [each for each in PARAMETERS.values() if each.kind in (int, float)]
# Values with the least effect, of parameters that beam searches do not take.
EFFECTIVE: dict[str, Any] = {
    "temperature": 1e-9,
    "top_p": 0,
    "top_k": 1,
    "min_p": 1e-9,
    "presence_penalty": -0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 0.9,
    "logit_bias": {"5": 1, "6": 0},
}


def completion(cls: type[CompletionBody] = CompletionBody, **fields: Any) -> CompletionBody:
    """A body with these fields.

    Raises:
        ApiError: it is refused.
    """
    return parse_body(cls, json.dumps({"model": "demo", "prompt": "Hi", **fields}).encode())


def chat(**fields: Any) -> ChatBody:
    """Likewise."""
    messages = [{"role": "user", "content": "Hi"}]
    return parse_body(
        ChatBody, json.dumps({"model": "demo", "messages": messages, **fields}).encode()
    )


def effective(parameter: Parameter) -> Any:
    """A value that is within the bounds and not neutral."""
    if parameter.kind not in (int, float):
        return EFFECTIVE[parameter.name]
    numbers = (parameter.maximum, 1.0, parameter.minimum)
    return next(number for number in numbers if number is not None and number != parameter.neutral)


def refusal_of(make: Any, **fields: Any) -> ApiError:
    """The error for a beam search with these fields."""
    with pytest.raises(ApiError) as caught:
        beam_params(make(use_beam_search=True, **fields))
    return caught.value


@pytest.mark.parametrize("parameter", NUMBERS, ids=lambda each: each.name)
def test_the_bounds_are_those_of_the_table(parameter: Parameter) -> None:
    name = parameter.name
    for bound in (parameter.minimum, parameter.maximum):
        if bound is not None:
            assert getattr(completion(**{name: bound}), name) == bound
    most = parameter.maximum if parameter.below is None else parameter.below - 1
    for bound, beyond in ((parameter.minimum, -1), (most, 1)):
        if bound is not None:
            value = bound + beyond
            with pytest.raises(ApiError) as caught:
                completion(**{name: value})
            assert caught.value.param == name
            assert str(caught.value).startswith(f"{name}={value}: ")


def test_a_beam_search_takes_a_parameter_only_if_the_table_declares_it() -> None:
    refused = {each.name: effective(each) for each in PARAMETERS.values() if not each.with_beams}
    assert refused.keys() >= EFFECTIVE.keys()
    for name, value in [*refused.items(), *EFFECTIVE.items()]:
        for make in (completion, chat):
            error = refusal_of(make, **{name: value})
            assert (error.status, error.param) == (400, name)
            assert str(error).startswith(f"{name}=")
    taken = {"seed": 3, "stop_token_ids": [4], "ignore_eos": True, "min_tokens": 2}
    assert taken.keys() <= {each.name for each in PARAMETERS.values() if each.with_beams}
    assert beam_params(completion(use_beam_search=True, **taken)) is not None


def test_a_beam_search_refuses_fields_that_it_was_not_made_for() -> None:
    class Newer(CompletionBody):
        typical: float | None = None

    def newer(**fields: Any) -> CompletionBody:
        return completion(Newer, **fields)

    assert beam_params(newer(use_beam_search=True)) is not None
    error = refusal_of(newer, typical=0.5)
    assert error.param == "typical"
    assert str(error) == "typical=0.5: a beam search does not take it; leave it out"
