"""Schemas of a response's input: messages, calls of functions, their outputs, and reasoning."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from gateway.openai.requests.body import Part

MAX_ITEMS = 10_000
MAX_PARTS = 1_000  # of one item
_KINDS = ("message", "function_call", "function_call_output", "reasoning")

_Status = Literal["in_progress", "completed", "incomplete"]
_Id = Annotated[str, Field(max_length=256)]


class InputText(Part):
    """A part of a message that is not the assistant's."""

    type: Literal["input_text"]
    text: str


class OutputText(Part):
    """A part of an assistant's message, as an earlier response had it."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] | None = None  # an earlier answer has none
    logprobs: list[Any] | None = None


class Refusal(Part):
    """A part of an assistant's message that says why there is no answer."""

    type: Literal["refusal"]
    refusal: str


class _OtherPart(Part):
    """Never valid: its error names the types that are."""

    type: Literal["input_text", "output_text", "refusal"]


def _tag(value: Any) -> str | None:
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def _part_tag(value: Any) -> str:
    tag = _tag(value)
    return f"as {tag}" if tag in ("input_text", "output_text", "refusal") else "as other"


_ContentPart = Annotated[
    Annotated[InputText, Tag("as input_text")]
    | Annotated[OutputText, Tag("as output_text")]
    | Annotated[Refusal, Tag("as refusal")]
    | Annotated[_OtherPart, Tag("as other")],
    Discriminator(_part_tag),
]


def _content_tag(value: Any) -> str:
    return "as parts" if isinstance(value, list) else "as text"


_Content = Annotated[
    Annotated[str, Tag("as text")]
    | Annotated[list[_ContentPart], Field(fail_fast=True, max_length=MAX_PARTS), Tag("as parts")],
    Discriminator(_content_tag),
]


class Message(Part):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system", "developer"]
    content: _Content
    type: Literal["message"] = "message"
    id: _Id | None = None
    status: _Status | None = None
    phase: str | None = None  # of an assistant's message, as other servers return it


class FunctionCall(Part):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: _Id
    name: str
    arguments: str  # JSON, as the model wrote it
    id: _Id | None = None
    status: _Status | None = None


_OutputParts = Annotated[list[InputText], Field(fail_fast=True, max_length=MAX_PARTS)]


class FunctionCallOutput(Part):
    """What a called function returned."""

    type: Literal["function_call_output"]
    call_id: _Id
    output: Annotated[
        Annotated[str, Tag("as text")] | Annotated[_OutputParts, Tag("as parts")],
        Discriminator(_content_tag),
    ]
    id: _Id | None = None
    status: _Status | None = None


class ReasoningText(Part):
    """Text of the model's reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Part):
    """Reasoning of an earlier answer."""

    type: Literal["reasoning"]
    id: _Id | None = None
    summary: Annotated[list[ReasoningText], Field(max_length=MAX_PARTS)] | None = None
    content: Annotated[list[ReasoningText], Field(max_length=MAX_PARTS)] | None = None
    encrypted_content: None = None
    status: _Status | None = None


class _OtherItem(Part):
    """Never valid: its error names the types that are."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"]


def _item_tag(value: Any) -> str:
    tag = _tag(value)
    if tag is None:
        return "as message"
    return f"as {tag}" if tag in _KINDS else "as other"


InputItem = Annotated[
    Annotated[Message, Tag("as message")]
    | Annotated[FunctionCall, Tag("as function_call")]
    | Annotated[FunctionCallOutput, Tag("as function_call_output")]
    | Annotated[ReasoningItem, Tag("as reasoning")]
    | Annotated[_OtherItem, Tag("as other")],
    Discriminator(_item_tag),
]

Input = Annotated[
    Annotated[str, Tag("as text")]
    | Annotated[
        list[InputItem], Field(fail_fast=True, min_length=1, max_length=MAX_ITEMS), Tag("as parts")
    ],
    Discriminator(_content_tag),
]


def text_of(content: str | list[Any]) -> str:
    """The text of a content: its parts, one after the other."""
    if isinstance(content, str):
        return content
    return "".join(part.refusal if part.type == "refusal" else part.text for part in content)
