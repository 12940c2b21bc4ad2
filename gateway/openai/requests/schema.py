"""Schemas of request bodies, with strict types.

An unknown field is refused by name, unless its value can be ignored without changing the answer.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Discriminator, Field, Tag, ValidationError, create_model

from gateway.http.errors import from_validation, invalid, invalid_value
from gateway.http.malformed_json import not_json
from gateway.openai.requests.body import Body, refuse_extra
from gateway.openai.requests.ignored_fields import (
    IGNORED,
    IGNORED_IN_STREAM_OPTIONS,
    describe_ignored,
)
from gateway.openai.requests.messages import (
    ChatMessage,
    ChatTool,
    ToolChoice,
    check_message,
    check_tools,
)
from gateway.openai.requests.sampling_fields import TokenIds, sampling_field
from gateway.openai.requests.structured_output import StructuredFields
from shared.sampling import PARAMETERS

MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_CHOICES = 128
MAX_SALT_CHARS = 256
MAX_LENGTH_PENALTY = 100.0
MAX_MESSAGES = 10_000
MAX_TOOLS = 1_000
MAX_PROMPTS = 10_000
MAX_DEADLINE_MS = 7 * 24 * 3_600_000

_NumChoices = Annotated[int, Field(ge=1, le=MAX_CHOICES)]


def _prompt_kind(value: object) -> str:
    if not isinstance(value, list):
        return "as text"
    if not value or isinstance(value[0], str):
        return "as texts"
    return "as lists" if isinstance(value[0], list) else "as tokens"


Prompt = Annotated[
    Annotated[str, Tag("as text")]
    | Annotated[
        list[str], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS), Tag("as texts")
    ]
    | Annotated[TokenIds, Tag("as tokens")]
    | Annotated[
        list[TokenIds],
        Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS),
        Tag("as lists"),
    ],
    Discriminator(_prompt_kind),
]

_StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stop = Annotated[
    Annotated[_StopText, Tag("as text")]
    | Annotated[list[_StopText], Field(fail_fast=True, max_length=MAX_STOPS), Tag("as list")],
    Discriminator(lambda value: "as list" if isinstance(value, list) else "as text"),
]

_Number = Annotated[float, Field(allow_inf_nan=False)]

EarlyStop = Annotated[
    Annotated[bool, Tag("as flag")] | Annotated[Literal["never"], Tag("as word")],
    Discriminator(lambda value: "as word" if isinstance(value, str) else "as flag"),
]


class StreamOptions(Body):
    """``stream_options`` of a body."""

    model_config = ConfigDict(json_schema_extra=describe_ignored(IGNORED_IN_STREAM_OPTIONS))

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage: the usage so far stands in every chunk."
    )


class _Generation(Body):
    model: str
    n: _NumChoices | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None


if TYPE_CHECKING:

    class _SamplingFields(_Generation):
        # Those that are read by name.
        seed: int | None
        min_tokens: int | None
        ignore_eos: bool | None
        logit_bias: dict[str, float] | None

else:
    _SamplingFields = create_model(
        "_SamplingFields",
        __base__=_Generation,
        **{name: sampling_field(parameter) for name, parameter in PARAMETERS.items()},
    )


class GenerationBody(_SamplingFields, StructuredFields):
    """What both ways to generate have in common; sampling parameters as in ``PARAMETERS``."""

    model_config = ConfigDict(json_schema_extra=describe_ignored(IGNORED))

    stop: Stop | None = None
    use_beam_search: bool | None = None  # with n as the number of beams
    length_penalty: (
        Annotated[_Number, Field(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)] | None
    ) = None
    early_stopping: EarlyStop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_resume: bool | None = None
    return_token_ids: bool | None = None
    include_stop_str_in_output: bool | None = Field(
        None, description="The text ends with the stop string, or the stop token's text."
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = Field(
        None,
        description="So many of the prompt's last tokens are kept. -1: as many as leave room for "
        "max_tokens.",
        json_schema_extra={"not": {"const": 0}},
    )
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None,
        description="Log-probabilities of the prompt's tokens, all but the first, and so many of "
        "the likeliest at their places. Not of streams and beam searches.",
    )
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_CHARS)] | None = None
    deadline_ms: Annotated[int, Field(ge=1, le=MAX_DEADLINE_MS)] | None = (
        None  # after the call arrived
    )
    user: str | None = None


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Prompt
    best_of: _NumChoices | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None


class ChatMessages(Body):
    """A conversation, and how the chat template renders it."""

    messages: Annotated[
        list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
    ]
    tools: Annotated[list[ChatTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = Field(
        None, description="Given to the chat template."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables of the chat template, such as enable_thinking."
    )
    add_generation_prompt: bool | None = Field(
        None, description="The prompt ends with the beginning of an answer; by default it does."
    )
    continue_final_message: bool | None = Field(
        None, description="The answer goes on where the last message, the assistant's, ends."
    )


class ChatBody(GenerationBody, ChatMessages):
    """POST /v1/chat/completions."""

    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None,
        description="Given to the chat template; without effect if that has no variable for it.",
    )

    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tool_choice: ToolChoice | None = Field(
        None, description="auto, the default with tools: the model decides. none: no calls."
    )
    parallel_tool_calls: bool | None = Field(
        None, description="false: the answer ends with the first call of a tool."
    )


class TokenizeTextBody(Body):
    """POST /tokenize with a text."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatBody(ChatMessages):
    """POST /tokenize with a conversation."""

    model: str | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: TokenIds
    model: str | None = None


_B = TypeVar("_B", bound=Body)


def parse_body(cls: type[_B], data: bytes) -> _B:
    """Parses and validates a body.

    Raises:
        ApiError: 400 that names the field and its value.
    """
    try:
        body = cls.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]  # of as many as a client likes: made only once
        if first["type"] == "json_invalid":
            raise not_json(data, first["msg"]) from None
        raise from_validation(first) from None
    refuse_extra(body, "", IGNORED if isinstance(body, GenerationBody) else {})
    if isinstance(body, ChatMessages):
        for index, message in enumerate(body.messages):
            check_message(message, f"messages[{index}].")
    if isinstance(body, GenerationBody) and body.stream_options is not None:
        refuse_extra(body.stream_options, "stream_options.", IGNORED_IN_STREAM_OPTIONS)
        if not body.stream:
            raise invalid("stream_options", "stream_options: only allowed when stream is true")
    if isinstance(body, GenerationBody) and body.stream_resume and not body.stream:
        raise invalid("stream_resume", "stream_resume: only allowed when stream is true")
    if isinstance(body, GenerationBody) and body.truncate_prompt_tokens == 0:
        raise invalid_value("truncate_prompt_tokens", 0, "must be at least 1, or -1")
    if isinstance(body, ChatBody):
        check_tools(body.tools or (), body.tool_choice)
    return body
