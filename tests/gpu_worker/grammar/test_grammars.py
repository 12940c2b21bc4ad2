"""Texts follow their grammars, however their sequences got here; others are as without them."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from gpu_worker.grammar.compiled import CompiledGrammars
from gpu_worker.grammar.grammars import Grammars
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup.build import build_worker
from gpu_worker.step.executor import Executor
from shared.messages.endings import EndFlag
from shared.messages.plans import Admission
from shared.sampling import SamplingParams, TokenBias
from tests.gpu_worker.beam_search import BeamSearch, beam_sampling, search
from tests.gpu_worker.grammar.conftest import DEMO
from tests.gpu_worker.overlapping import Overlapping
from tests.gpu_worker.planner import Planner, ints, sampling, step_plan

MOST_TOKENS = 160
SCHEMAS: list[dict[str, Any]] = [
    {"type": "boolean"},
    {"enum": ["red", "green", 3, None]},
    {"type": "integer", "minimum": 10, "maximum": 99},
    {"type": "string", "maxLength": 12},
    {"type": "string", "pattern": "^[a-z]{2}-[0-9]{4}$"},
    {"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": 0}, "maxItems": 4},
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "ok": {"type": "boolean"}},
        "required": ["name", "ok"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"point": {"$ref": "#/$defs/point"}},
        "required": ["point"],
        "additionalProperties": False,
        "$defs": {
            "point": {
                "type": "object",
                "properties": {"x": {"const": 1}, "y": {"enum": [1, 2]}},
                "required": ["x", "y"],
                "additionalProperties": False,
            }
        },
    },
    {"anyOf": [{"const": "yes"}, {"type": "integer", "minimum": 0, "maximum": 5}]},
]


@pytest.fixture
def planner(executor: Executor) -> Iterator[Planner]:
    executor.reset()
    yield Planner(executor)
    executor.reset()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def grammar_of(schema: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})


def drawn(schema: dict[str, Any], seed: int, **changes: Any) -> SamplingParams:
    """Temperature 1, and a grammar."""
    return sampling(
        temperature=1.0,
        seed=seed,
        max_tokens=MOST_TOKENS,
        ignore_eos=False,
        grammar=grammar_of(schema),
        **changes,
    )


def run(planner: Planner, handles: list[int]) -> None:
    """Decode until all have ended."""
    while any(not planner.known[handle].ended for handle in handles):
        planner.step()


def text_of(planner: Planner, handle: int, tokenizer: Tokenizer) -> str:
    text: str = tokenizer.decode(planner.known[handle].output, skip_special_tokens=True)
    return text


def check(planner: Planner, handle: int, schema: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Valid if the text is finished; else the beginning of something valid."""
    known = planner.known[handle]
    if known.ended == EndFlag.STOP:
        jsonschema_rs.validate(schema, json.loads(text_of(planner, handle, tokenizer)))
        return
    assert len(known.output) == MOST_TOKENS
    matcher = LLMatcher(LLTokenizer((DEMO / "tokenizer.json").read_text()), grammar_of(schema))
    assert matcher.consume_tokens(known.output)


def prompt(tokenizer: Tokenizer) -> list[int]:
    tokens: list[int] = tokenizer.encode("Once upon a time there was").ids
    return tokens


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_texts_follow_their_schema(
    planner: Planner, tokenizer: Tokenizer, schema: dict[str, Any]
) -> None:
    tokens = prompt(tokenizer)
    handles = list(range(1, 7))
    for handle in handles:
        more = {"repetition_penalty": 1.3} if handle % 2 else {"logit_bias": (TokenBias(5, 40.0),)}
        planner.admit(handle, tokens, drawn(schema, handle, **more))
    planner.step(**{f"s{handle}": len(tokens) for handle in handles})
    run(planner, handles)
    for handle in handles:
        check(planner, handle, schema, tokenizer)


def test_greedy_texts_follow_their_grammar_beside_others_without(
    planner: Planner, tokenizer: Tokenizer
) -> None:
    tokens = prompt(tokenizer)
    planner.admit(1, tokens, sampling(max_tokens=30))
    planner.step(s1=len(tokens))
    run(planner, [1])
    alone = planner.known[1].output

    grammar = LLMatcher.grammar_from_regex("(red|green|blue) [0-9]{3}")
    planner.retire(1)
    planner.admit(2, tokens, sampling(max_tokens=30))
    planner.admit(3, tokens, sampling(max_tokens=30, ignore_eos=False, grammar=grammar))
    planner.step(s2=len(tokens), s3=len(tokens))
    run(planner, [2, 3])
    assert planner.known[2].output == alone
    color, number = text_of(planner, 3, tokenizer).split(" ")
    assert color in ("red", "green", "blue")
    assert len(number) == 3
    assert planner.known[3].ended == EndFlag.STOP


def test_a_sequence_that_is_admitted_again_goes_on_in_its_grammar(
    planner: Planner, tokenizer: Tokenizer
) -> None:
    schema, tokens = SCHEMAS[6], prompt(tokenizer)
    planner.admit(1, tokens, drawn(schema, 5))
    planner.step(s1=len(tokens))
    run(planner, [1])
    whole = planner.retire(1).output
    assert len(whole) > 4
    for cut in range(1, len(whole)):
        handle = 10 + cut
        so_far = tokens + whole[:cut]
        planner.admit(handle, so_far, drawn(schema, 5), num_prompt_tokens=len(tokens))
        planner.step(**{f"s{handle}": len(so_far)})
        run(planner, [handle])
        assert whole[:cut] + planner.retire(handle).output == whole


def test_steps_that_begin_before_the_one_before_has_ended_give_the_same_texts(
    executor: Executor, tokenizer: Tokenizer
) -> None:
    tokens, outputs = prompt(tokenizer), []
    for driven in (executor, Overlapping(executor)):
        executor.reset()
        planner = Planner(driven)  # type: ignore[arg-type]
        for handle, schema in enumerate(SCHEMAS, 1):
            planner.admit(handle, tokens, drawn(schema, handle))
        handles = list(range(1, len(SCHEMAS) + 1))
        planner.step(**{f"s{handle}": len(tokens) for handle in handles})
        run(planner, handles)
        outputs.append([planner.known[handle].output for handle in handles])
    executor.reset()
    assert outputs[0] == outputs[1]


def test_choices_of_a_request_follow_its_grammar_each(
    planner: Planner, tokenizer: Tokenizer
) -> None:
    schema, tokens = SCHEMAS[6], prompt(tokenizer)
    planner.admit(1, tokens, drawn(schema, 3))
    planner.fork(1, 2, choice=1)
    planner.fork(1, 3, choice=2)
    planner.step(s1=len(tokens))
    run(planner, [1, 2, 3])
    assert len({tuple(planner.known[handle].output) for handle in (1, 2, 3)}) > 1
    for handle in (1, 2, 3):
        check(planner, handle, schema, tokenizer)


def test_beams_follow_their_grammar(planner: Planner, tokenizer: Tokenizer) -> None:
    schema = SCHEMAS[6]
    params = replace(
        beam_sampling(3, max_tokens=MOST_TOKENS, ignore_eos=False), grammar=grammar_of(schema)
    )
    tokens = prompt(tokenizer)
    beams = BeamSearch(planner, 1, tokens, params)
    search(planner, beams)
    assert beams.finished
    for found in beams.finished:
        text = tokenizer.decode(list(found.output), skip_special_tokens=True)
        jsonschema_rs.validate(schema, json.loads(text))


def test_log_probabilities_stay_the_models_own(planner: Planner, tokenizer: Tokenizer) -> None:
    tokens = prompt(tokenizer)
    planner.admit(1, tokens, sampling(num_logprobs=1, grammar=grammar_of({"const": "zzz"})))
    result = planner.step(s1=len(tokens))
    [found] = result.logprobs
    # The model would rather have said something else.
    assert found.top_ids[0] != result.tokens[0]
    assert found.logprob < found.top_logprobs[0]


def test_a_grammar_that_fails_ends_its_own_text_alone(
    planner: Planner, tokenizer: Tokenizer
) -> None:
    tokens = prompt(tokenizer)
    planner.admit(1, tokens, sampling(ignore_eos=False, grammar="no grammar at all {"))
    planner.admit(2, tokens, sampling(max_tokens=5))
    planner.step(s1=len(tokens), s2=len(tokens))
    run(planner, [1, 2])
    assert planner.known[1].ended == EndFlag.ERROR
    assert len(planner.known[1].output) == 1
    assert len(planner.known[2].output) == 5


def test_a_text_at_a_dead_end_of_its_grammar_ends_with_an_error(
    executor: Executor, tokenizer: Tokenizer
) -> None:
    grammar = LLMatcher.grammar_from_lark('start: "ab" x\nx: "c" x')  # x never ends
    for driven in (executor, Overlapping(executor)):
        executor.reset()
        planner = Planner(driven)  # type: ignore[arg-type]
        tokens = prompt(tokenizer)
        planner.admit(1, tokens, sampling(ignore_eos=False, grammar=grammar))
        planner.admit(2, tokens, sampling(max_tokens=9))
        planner.step(s1=len(tokens), s2=len(tokens))
        run(planner, [1, 2])
        assert planner.known[1].ended == EndFlag.ERROR
        assert planner.known[2].ended == EndFlag.LENGTH
        assert len(planner.known[2].output) == 9
    executor.reset()


def test_beams_whose_grammar_fails_have_no_candidates(
    planner: Planner, tokenizer: Tokenizer
) -> None:
    params = replace(beam_sampling(3, ignore_eos=False), grammar="no grammar at all {")
    tokens = prompt(tokenizer)
    beams = BeamSearch(planner, 1, tokens, params)
    search(planner, beams)
    assert not beams.finished


def test_a_grammar_is_compiled_once_for_all_sequences_with_it(
    grammar_tokenizer: LLTokenizer,
) -> None:
    compiled = CompiledGrammars(grammar_tokenizer)
    grammar = grammar_of(SCHEMAS[6])
    first = compiled.begin(grammar)
    assert compiled.begin(grammar) is first
    assert not first.result().is_error()
    large = [LLMatcher.grammar_from_regex("x" * 300_000 + str(number)) for number in range(4)]
    for each in large:
        compiled.begin(each)
    assert compiled.begin(grammar) is not first  # forgotten


def test_an_admission_may_follow_the_grammar_of_another(
    planner: Planner, tokenizer: Tokenizer
) -> None:
    tokens, schema = prompt(tokenizer), SCHEMAS[6]
    planner.admit(1, tokens, drawn(schema, 3))
    planner.admit(2, tokens, replace(drawn(schema, 4), grammar=""), grammar_of=1)
    planner.step(s1=len(tokens), s2=len(tokens))
    run(planner, [1, 2])
    for handle in (1, 2):
        check(planner, handle, schema, tokenizer)


def test_a_model_without_a_tokenizer_takes_no_grammars(tmp_path: Path, executor: Executor) -> None:
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        (tmp_path / name).symlink_to(DEMO / name)
    settings = WorkerSettings(model=str(tmp_path), device="cpu", num_blocks=200)
    assert not build_worker(settings).model.takes_grammars
    assert build_worker(replace(settings, model=str(DEMO))).model.takes_grammars


def test_ends_outside_the_vocabulary_are_left_out() -> None:
    grammars = Grammars(None, 96, (2, -1, 96, 200), torch.device("cpu"))
    new = Admission(1, 0, ints(5), 1, 0, ints(), sampling(grammar="{}"))
    grammars.follow(step_plan(1, admissions=(new,)))
    (allowed,) = grammars.unpack(grammars.masks(ints(1)))
    assert allowed.nonzero().flatten().tolist() == [2]
