"""Prompts as long as the context, and prompts that are truncated to fit into it."""

from dataclasses import replace

from gateway.engine.engine_status import Engine
from gateway.http.errors import invalid_value
from gateway.openai.requests.output_options import OutputOptions
from gateway.openai.requests.schema import ChatBody, GenerationBody
from gateway.openai.requests.validation import COMPLETION_MAX_TOKENS
from gateway.prompts.prompt import Prompt
from shared.sampling import BeamParams, SamplingParams, TokenBias

_CERTAIN_BIAS = 1e6  # larger than all logits, and exact enough in single precision


def truncated(prompt: Prompt, body: GenerationBody, engine: Engine) -> Prompt:
    """The last tokens of a prompt, as many as ``truncate_prompt_tokens`` allows.

    Raises:
        ApiError: 400, more than the context has.
    """
    most = body.truncate_prompt_tokens
    if most is None:
        return prompt
    context = engine.model.max_model_len
    if most > context:
        reason = f"the model's context is {context} tokens"
        raise invalid_value("truncate_prompt_tokens", most, reason)
    if most == -1:
        most = min(context, engine.pool_tokens) - _room_for_output(body)
    if not 0 < most < len(prompt.tokens):
        return prompt
    return replace(prompt, tokens=prompt.tokens[-most:], text=None)


def scores_last(
    prompt: Prompt, output: OutputOptions, beams: BeamParams | None, engine: Engine
) -> bool:
    """Whether the engine is to generate the last token of a prompt that fills the whole context.

    Such a prompt can only be scored. The engine generates at least one token, so it gets all tokens
    but the last one, and generates that one with its log-probability.
    """
    is_full = len(prompt.tokens) == engine.model.max_model_len > 1
    return is_full and not output.generate and beams is None


def sampling_of_last(prompt: Prompt, sampling: SamplingParams) -> SamplingParams:
    """Parameters that generate the prompt's last token with the log-probabilities of prompts."""
    return replace(
        SamplingParams.greedy(1),
        ignore_eos=True,
        num_logprobs=sampling.num_prompt_logprobs,
        num_prompt_logprobs=sampling.num_prompt_logprobs,
        logit_bias=(TokenBias(prompt.tokens[-1], _CERTAIN_BIAS),),
    )


def _room_for_output(body: GenerationBody) -> int:
    if isinstance(body, ChatBody):
        return body.max_completion_tokens or body.max_tokens or 1
    return COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
