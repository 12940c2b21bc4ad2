"""Schemas of response bodies, for the OpenAPI description; tests check real answers with them."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

_FinishReason = Literal["stop", "length", "deadline"]
_Count = Annotated[int, Field(ge=0)]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(_Answer):
    """What is wrong."""

    message: str
    type: str
    param: str | None  # field or header of the request that is at fault
    code: str | None  # for programs to compare


class ErrorAnswer(_Answer):
    """Any answer other than success."""

    error: ErrorDetail


class CachedTokens(_Answer):
    """Tokens of the prompts that were found in the prefix cache."""

    cached_tokens: _Count


class ReasoningTokens(_Answer):
    """Generated tokens that are reasoning, where the model's is recognized."""

    reasoning_tokens: _Count


class UsageAnswer(_Answer):
    """Numbers of tokens that an answer used."""

    prompt_tokens: _Count
    completion_tokens: _Count
    total_tokens: _Count
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens


class CompletionLogprobs(_Answer):
    """Log-probabilities of all tokens of a text, in columns."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(_Answer):
    """A token at a position of a prompt."""

    logprob: float
    rank: Annotated[int, Field(ge=1)] | None  # null: it is not among the likeliest that are shown
    decoded_token: str


# For each position of a prompt, scores by token id; null for the first position.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(_Answer):
    """One text."""

    index: _Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: _FinishReason
    beam_score: float | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionAnswer(_Answer):
    """Answer of POST /v1/completions without stream."""

    id: str
    object: Literal["text_completion"]
    created: int  # seconds since 1970
    model: str
    choices: list[CompletionChoice]
    usage: UsageAnswer


class TokenLogprob(_Answer):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[Annotated[int, Field(ge=0, le=255)]]


class ScoredChatToken(TokenLogprob):
    """A token of an answer, with the likeliest tokens at its position."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(_Answer):
    """Log-probabilities of all tokens of an answer."""

    content: list[ScoredChatToken]
    refusal: None


class CalledFunctionAnswer(_Answer):
    """The function that the model calls."""

    name: str
    arguments: str  # JSON, as the model wrote it


class ToolCallAnswer(_Answer):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunctionAnswer


class AssistantMessage(_Answer):
    """The message that the model generated."""

    role: Literal["assistant"]
    content: str | None  # null if there are only calls of tools
    refusal: None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same
    tool_calls: list[ToolCallAnswer] | None = None


class ChatChoice(_Answer):
    """One answer."""

    index: _Count
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: _FinishReason | Literal["tool_calls"]
    beam_score: float | None = None
    token_ids: list[int] | None = None


class ChatAnswer(_Answer):
    """Answer of POST /v1/chat/completions without stream."""

    id: str
    object: Literal["chat.completion"]
    created: int  # seconds since 1970
    model: str
    choices: list[ChatChoice]
    usage: UsageAnswer
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ModelCard(_Answer):
    """A model that is served here."""

    id: str
    object: Literal["model"]
    created: int  # since when this gateway serves it, seconds since 1970
    owned_by: str
    root: str  # what it was loaded from, a folder or a hub id
    parent: None
    ready: bool  # an engine can take requests now
    num_engines: _Count  # that can take requests now
    max_model_len: int | None  # null while there is no engine
    default_sampling_params: dict[str, float]  # of the model, where a request gives none
    permission: list[None]  # none are given


class ModelList(_Answer):
    """The models that are served here."""

    object: Literal["list"]
    data: list[ModelCard]


class PrefixCard(_Answer):
    """A prefix that is pinned in the KV cache."""

    id: str
    object: Literal["prefix"]
    model: str
    name: str
    num_tokens: _Count
    state: Literal["pending", "pinned", "refused"]


class PrefixList(_Answer):
    """All prefixes that this gateway pins."""

    object: Literal["list"]
    data: list[PrefixCard]


class TokensAnswer(_Answer):
    """Tokens of a text or of a conversation."""

    count: _Count
    max_model_len: int | None  # null while there is no engine
    tokens: list[int]
    token_strs: list[str] | None = None


class TextAnswer(_Answer):
    """Text of tokens."""

    prompt: str


class VersionAnswer(_Answer):
    """The version of PageStream."""

    version: str


class Alive(_Answer):
    """The process runs."""

    status: Literal["alive"]


class Ready(_Answer):
    """A request sent now would be served."""

    status: Literal["ready"]


class NotReady(_Answer):
    """A request sent now would be refused."""

    status: Literal["not ready"]
    check: Literal["gateway", "engine", "steps", "log"]  # that failed
    detail: str
