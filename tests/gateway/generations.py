"""Generations for tests."""

from collections.abc import Sequence
from dataclasses import replace

from gateway.openai.generation.generation import Generation
from gateway.openai.generation.generation_output import GenerationOutput
from gateway.prompts.prompt import Prompt
from gateway.resume.stream_context import Display, request_id
from gateway.service import Service
from tests.support.requests import submit


def generation_of(service: Service, prompts: Sequence[Prompt], display: Display) -> Generation:
    """A generation that is not submitted yet."""
    submits = [
        replace(
            submit(
                request_id(display.call_id, position),
                prompt.tokens,
                num_choices=display.output.num_candidates,
            ),
            gateway=service.engine.instance,
        )
        for position, prompt in enumerate(prompts)
    ]
    output = GenerationOutput(
        service.tokenizer,
        service.metrics,
        display,
        prompts,
        submits,
        started_s=0.0,
        formats=service.answers,
    )
    return Generation(service.engine, service.metrics, output)
