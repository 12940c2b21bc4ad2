"""Schemas of every kind, in the manner of the JSON Schema Test Suite: what the demo model writes at
temperature 1 is valid, or, where it is cut off, the beginning of something valid.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from llguidance import LLMatcher, LLTokenizer

from gateway.grammars.constraints import JsonSchema
from gpu_worker.step.executor import Executor
from shared.messages.endings import EndFlag
from shared.sampling import SamplingParams
from tests.gpu_worker.planner import Planner, sampling

MOST_TOKENS = 150
AT_ONCE = 64
NUM_ANSWERS = 3  # to each schema
CASES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("schemas.json").read_text())
SCHEMAS = {case["name"]: case["schema"] for case in CASES}
_STRING = re.compile(r'"(?:[^"\\]|\\.)*("|\\?$)')


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    text: str
    finished: bool


@pytest.fixture(scope="module")
def answers(
    executor: Executor, grammar_tokenizer: LLTokenizer
) -> Iterator[dict[str, list[Answer]]]:
    """Answers to each schema."""
    executor.reset()
    planner = Planner(executor)
    prompt = grammar_tokenizer.tokenize_str("Once upon a time there was")
    waiting = list(enumerate([*SCHEMAS] * NUM_ANSWERS, 1))
    running, found = dict[int, str](), dict[str, list[Answer]]()
    while waiting or running:
        chunks = {}
        while waiting and len(running) < AT_ONCE:
            handle, name = waiting.pop()
            planner.admit(handle, prompt, drawn(SCHEMAS[name], seed=handle))
            running[handle], chunks[f"s{handle}"] = name, len(prompt)
        planner.step(**chunks)
        for handle in [each for each in running if planner.known[each].ended]:
            known = planner.retire(handle)
            finished = known.ended == EndFlag.STOP
            tokens = known.output[:-1] if finished else known.output
            answer = Answer(tokens, grammar_tokenizer.decode_str(tokens), finished)
            found.setdefault(running.pop(handle), []).append(answer)
    yield found
    executor.reset()


def drawn(schema: dict[str, Any], seed: int) -> SamplingParams:
    return sampling(
        temperature=1.0,
        seed=seed,
        max_tokens=MOST_TOKENS,
        ignore_eos=False,
        grammar=JsonSchema(schema).grammar(),
    )


def test_there_are_a_hundred_and_more() -> None:
    assert len(SCHEMAS) == len(CASES) >= 100


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_are_valid_or_begin_so(
    name: str, answers: dict[str, list[Answer]], grammar_tokenizer: LLTokenizer
) -> None:
    schema = SCHEMAS[name]
    jsonschema_rs.meta.validate(schema)
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    assert len(answers[name]) == NUM_ANSWERS
    for answer in answers[name]:
        if answer.finished:
            validator.validate(json.loads(answer.text))
        else:
            assert len(answer.tokens) == MOST_TOKENS
            matcher = LLMatcher(grammar_tokenizer, JsonSchema(schema).grammar())
            assert matcher.consume_tokens(answer.tokens)
        for spaces in re.findall(r"\s+", _STRING.sub('""', answer.text)):
            assert re.fullmatch(r"\n {0,16}| ", spaces), answer.text


def test_most_answers_are_finished(answers: dict[str, list[Answer]]) -> None:
    for_each = {name: sum(each.finished for each in found) for name, found in answers.items()}
    assert sum(for_each.values()) > 0.8 * NUM_ANSWERS * len(SCHEMAS), for_each
