"""Generations for tests."""

from collections.abc import Sequence
from dataclasses import replace

from gateway.models.model_table import ModelTable
from gateway.openai.generation.generation import Generation
from gateway.openai.generation.generation_output import GenerationOutput
from gateway.prompts.prompt import Prompt
from gateway.resume.stream_context import Display, request_id
from tests.support.requests import submit


def generation_of(models: ModelTable, prompts: Sequence[Prompt], display: Display) -> Generation:
    """A generation of the only model, that is not submitted yet."""
    [model] = models.served
    submits = [
        replace(
            submit(
                request_id(display.call_id, position),
                prompt.tokens,
                num_choices=display.output.num_candidates,
            ),
            gateway="gateway",
        )
        for position, prompt in enumerate(prompts)
    ]
    output = GenerationOutput(
        model.tokenizer,
        model.metrics,
        display,
        prompts,
        submits,
        started_s=0.0,
        formats=model.answers,
    )
    return Generation(model.engine, model.metrics, output)
