"""Displays for tests."""

from dataclasses import replace
from typing import Any

from gateway.openai.requests.output_options import OutputOptions
from gateway.resume.stream_context import Display


def display(**changes: Any) -> Display:
    """One completion of one choice; ``changes`` by field, also of its output."""
    values: dict[str, Any] = {
        "call_id": "0123456789abcdef" * 2,
        "is_chat": False,
        "model": "demo",
        "created": 1,
        "num_prompts": 1,
        "prompt_text": None,
        "output": OutputOptions(
            stops=(),
            min_tokens=0,
            num_logprobs=None,
            echo=False,
            generate=True,
            token_ids=False,
            num_choices=1,
            num_candidates=1,
        ),
        "include_usage": False,
        "resumable": False,
        "fingerprint": "",
    }
    shown = {name: changes.pop(name) for name in list(changes) if name not in values}
    values["output"] = replace(values["output"], **shown)
    return Display(**{**values, **changes})
