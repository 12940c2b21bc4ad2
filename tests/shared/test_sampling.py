"""The table of sampling parameters agrees with the messages that it describes."""

import dataclasses

import pytest

from shared.sampling import PARAMETERS, Effect, Parameter, SamplingParams

# Fields without a default: those of the first version of the message.
FIRST = {"temperature", "top_p", "top_k", "min_p", "seed", "stop_token_ids"} | {
    *("ignore_eos", "min_tokens"),
}
EACH = pytest.mark.parametrize("parameter", PARAMETERS.values(), ids=lambda each: each.name)


def test_the_gateway_fills_the_fields_that_are_no_parameters() -> None:
    others = [field.name for field in dataclasses.fields(SamplingParams)]
    assert set(others) - set(PARAMETERS) == {
        *("max_tokens", "num_logprobs", "num_prompt_logprobs", "beams", "grammar"),
    }


@EACH
def test_a_newer_parameter_that_was_not_sent_has_no_effect(parameter: Parameter) -> None:
    (field,) = [each for each in dataclasses.fields(SamplingParams) if each.name == parameter.name]
    if parameter.name in FIRST:
        assert field.default is dataclasses.MISSING
    else:
        assert field.default == parameter.neutral


@EACH
def test_greedy_sequences_have_neutral_values(parameter: Parameter) -> None:
    if parameter.effect is not Effect.END:
        assert getattr(SamplingParams.greedy(3), parameter.name) == parameter.neutral


@EACH
def test_the_default_is_given_for_nothing(parameter: Parameter) -> None:
    assert parameter.value(None) == parameter.default


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("top_p", 0.0, 2.0**-126),
        ("top_k", -1, 0),
        ("seed", -1, 2**63 - 1),
        ("stop_token_ids", [3, 4], (3, 4)),
        ("logit_bias", {"5": 0.0}, ()),
        ("temperature", 0.0, 0.0),
        ("repetition_penalty", 1, 1.0),
    ],
)
def test_what_a_request_gives_becomes_the_value(name: str, given: object, value: object) -> None:
    assert PARAMETERS[name].value(given) == value


def test_each_logit_parameter_changes_logits() -> None:
    greedy = SamplingParams.greedy(3)
    assert not greedy.changes_logits
    others = {"logit_bias": {"5": 1.0}, "repetition_penalty": 2.0}
    for name, parameter in PARAMETERS.items():
        value = parameter.value(others.get(name, 1.0)) if parameter.effect is Effect.LOGITS else 0
        if parameter.effect is Effect.LOGITS:
            assert dataclasses.replace(greedy, **{name: value}).changes_logits
