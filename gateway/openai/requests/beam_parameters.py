"""Beam search: its parameters from a body's fields, or a 400 that names what it does not take."""

from collections.abc import Iterator

from gateway.http.errors import invalid_value
from gateway.openai.requests.schema import ChatBody, CompletionBody
from shared.sampling import PARAMETERS, BeamParams, EarlyStopping, Effect

MAX_BEAMS = 64

_EARLY_STOPPING = {
    True: EarlyStopping.AT_ONCE,
    False: EarlyStopping.ESTIMATED,
    "never": EarlyStopping.NEVER,
}
# Fields beside sampling parameters that a search takes, some with restrictions (see below). All
# others are refused, also those that bodies may have one day.
_TAKEN = frozenset(
    {
        *("model", "prompt", "messages", "tools", "tool_choice", "parallel_tool_calls"),
        "truncate_prompt_tokens",
        *("use_beam_search", "n", "best_of", "length_penalty", "early_stopping"),
        *("max_tokens", "max_completion_tokens", "stop", "include_stop_str_in_output"),
        *("response_format", "structured_outputs"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        *("echo", "logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids"),
        *("stream", "stream_options", "stream_resume"),
        *("priority", "deadline_ms", "cache_salt", "user"),
    }
)
_NO_SAMPLING = "a beam search follows the likeliest tokens and does not sample; leave it out"
_REASONS = {
    Effect.SAMPLE: _NO_SAMPLING,
    Effect.LOGITS: "a beam search follows the model's own probabilities; leave it out",
}
_NOT_TAKEN = "a beam search does not take it; leave it out"


def beam_params(body: CompletionBody | ChatBody) -> BeamParams | None:
    """How to search, None if tokens are to be sampled.

    Raises:
        ApiError: 400, a field asks for what does not go together with that.
    """
    faults = _faults_of_search(body) if body.use_beam_search else _faults_without(body)
    for field, reason in faults:
        raise invalid_value(field, getattr(body, field), reason)
    if not body.use_beam_search:
        return None
    return BeamParams(
        width=body.n or 1,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        early_stopping=_EARLY_STOPPING[body.early_stopping or False],
    )


def _faults_of_search(body: CompletionBody | ChatBody) -> Iterator[tuple[str, str]]:
    """Fields with the reasons why a beam search refuses them."""
    if (body.n or 1) > MAX_BEAMS:
        yield "n", f"a beam search keeps at most {MAX_BEAMS} beams"
    yield from _faults_of_sampling(body)
    if body.stop:
        yield "stop", "a beam search does not look at text; stop_token_ids can end its beams"
    if body.max_tokens == 0:
        yield "max_tokens", "a beam search needs at least one token to search for"
    if body.prompt_logprobs is not None:
        yield "prompt_logprobs", "a beam search has no log-probabilities of the prompt"
    if isinstance(body, ChatBody):
        yield from _faults_of_scores("top_logprobs", body.top_logprobs)
    else:
        yield from _faults_of_completion(body)
    for field in type(body).model_fields:
        if field not in _TAKEN and field not in PARAMETERS and getattr(body, field) is not None:
            yield field, _NOT_TAKEN


def _faults_of_sampling(body: CompletionBody | ChatBody) -> Iterator[tuple[str, str]]:
    """Sampling parameters that searches do not take, with other values than the neutral one."""
    for name, parameter in PARAMETERS.items():
        given = getattr(body, name)
        if parameter.with_beams or given is None or parameter.value(given) == parameter.neutral:
            continue
        reason = _REASONS.get(parameter.effect, _NOT_TAKEN)
        yield name, f"{reason}, or give 0" if name == "temperature" else reason


def _faults_of_completion(body: CompletionBody) -> Iterator[tuple[str, str]]:
    width = body.n or 1
    if body.best_of not in (None, width):
        yield "best_of", f"a beam search gives all the beams it keeps, and n is {width}"
    yield from _faults_of_scores("logprobs", body.logprobs)
    if body.echo and body.logprobs is not None:
        yield "echo", "a beam search has no log-probabilities of the prompt; leave logprobs out"


def _faults_of_scores(field: str, num_logprobs: int | None) -> Iterator[tuple[str, str]]:
    if num_logprobs:
        yield field, "of a beam search only the chosen tokens' log-probabilities are known; give 0"


def _faults_without(body: CompletionBody | ChatBody) -> Iterator[tuple[str, str]]:
    """Fields of a search that is not asked for."""
    needs = "needs use_beam_search to be true"
    if body.length_penalty not in (None, 1.0):
        yield "length_penalty", needs
    if body.early_stopping not in (None, False):
        yield "early_stopping", needs
