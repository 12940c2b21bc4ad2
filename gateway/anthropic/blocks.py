"""Schemas of a message's content: text, calls of tools and their results, and thinking."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from gateway.openai.requests.body import Part

MAX_BLOCKS = 1_000  # of one message
_KINDS = ("text", "tool_use", "tool_result", "thinking")


class _CacheControl(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    type: Literal["ephemeral"]


class _Cached(Part):
    cache_control: _CacheControl | None = Field(
        None, description="Without effect: prefixes are cached by themselves."
    )


class TextBlock(_Cached):
    """A text."""

    type: Literal["text"]
    text: str
    citations: list[Any] | None = Field(None, max_length=0)


class ToolUse(_Cached):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(max_length=256)]
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None  # as clients return it


class _OtherText(Part):
    """Never valid: its error names the type that is."""

    type: Literal["text"]


def _tag(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


_Texts = Annotated[
    list[
        Annotated[
            Annotated[TextBlock, Tag("as text")] | Annotated[_OtherText, Tag("as other")],
            Discriminator(lambda value: "as text" if _tag(value) == "text" else "as other"),
        ]
    ],
    Field(fail_fast=True, max_length=MAX_BLOCKS),
]


def _is_list(value: Any) -> str:
    return "as list" if isinstance(value, list) else "as string"


Text = Annotated[
    Annotated[str, Tag("as string")] | Annotated[_Texts, Tag("as list")], Discriminator(_is_list)
]


class ToolResult(_Cached):
    """What a called tool returned."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(max_length=256)]
    content: Text | None = None
    is_error: bool | None = None


class Thinking(Part):
    """The model's reasoning in an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None  # never checked: reasoning is text like any other


class _OtherBlock(Part):
    """Never valid: its error names the types that are."""

    type: Literal["text", "tool_use", "tool_result", "thinking"]


def _block_tag(value: Any) -> str:
    tag = _tag(value)
    return f"as {tag}" if tag in _KINDS else "as other"


Block = Annotated[
    Annotated[TextBlock, Tag("as text")]
    | Annotated[ToolUse, Tag("as tool_use")]
    | Annotated[ToolResult, Tag("as tool_result")]
    | Annotated[Thinking, Tag("as thinking")]
    | Annotated[_OtherBlock, Tag("as other")],
    Discriminator(_block_tag),
]

Content = Annotated[
    Annotated[str, Tag("as string")]
    | Annotated[list[Block], Field(fail_fast=True, max_length=MAX_BLOCKS), Tag("as list")],
    Discriminator(_is_list),
]


def text_of(given: str | list[Any] | None) -> str:
    """A text, or the texts of blocks, each on lines of its own."""
    if isinstance(given, str):
        return given
    return "\n".join(block.text for block in given or ())
