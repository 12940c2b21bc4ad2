"""The bodies that clients get, for the API's description. Tests compare real answers with them."""

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
    code: str | None  # a word for programs


class ErrorAnswer(_Answer):
    """Any answer other than success."""

    error: ErrorDetail


class CachedTokens(_Answer):
    """Of the prompts, found in the prefix cache."""

    cached_tokens: _Count


class UsageAnswer(_Answer):
    """What an answer cost."""

    prompt_tokens: _Count
    completion_tokens: _Count
    total_tokens: _Count
    prompt_tokens_details: CachedTokens


class CompletionLogprobs(_Answer):
    """Of all tokens of a text, in columns."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(_Answer):
    """A token at its place in a prompt."""

    logprob: float
    rank: Annotated[int, Field(ge=1)] | None  # null: it is none of the likeliest asked for
    decoded_token: str


# By token id, for each token of a prompt; null for the first, which nothing is before.
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
    """Of POST /v1/completions, unless it streams."""

    id: str
    object: Literal["text_completion"]
    created: int  # seconds since 1970
    model: str
    choices: list[CompletionChoice]
    usage: UsageAnswer


class TokenLogprob(_Answer):
    """One token."""

    token: str
    logprob: float
    bytes: list[Annotated[int, Field(ge=0, le=255)]]


class ScoredChatToken(TokenLogprob):
    """One token of an answer, with those that were likeliest at its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(_Answer):
    """Of all tokens of an answer."""

    content: list[ScoredChatToken]
    refusal: None


class AssistantMessage(_Answer):
    """What the model says."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_Answer):
    """One answer."""

    index: _Count
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: _FinishReason
    beam_score: float | None = None
    token_ids: list[int] | None = None


class ChatAnswer(_Answer):
    """Of POST /v1/chat/completions, unless it streams."""

    id: str
    object: Literal["chat.completion"]
    created: int  # seconds since 1970
    model: str
    choices: list[ChatChoice]
    usage: UsageAnswer
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ModelCard(_Answer):
    """The model that is served here."""

    id: str
    object: Literal["model"]
    created: int  # when the gateway started, seconds since 1970
    owned_by: str
    root: str  # what it was loaded from, a folder or a hub id
    parent: None
    max_model_len: int | None  # null while there is no engine
    permission: list[None]  # none are given


class ModelList(_Answer):
    """Always one."""

    object: Literal["list"]
    data: list[ModelCard]


class PrefixCard(_Answer):
    """A prompt's beginning that is to stay in the KV cache."""

    id: str
    object: Literal["prefix"]
    name: str
    num_tokens: _Count
    state: Literal["pending", "pinned", "refused"]


class PrefixList(_Answer):
    """All that this gateway names."""

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
    """Of PageStream."""

    version: str


class Alive(_Answer):
    """The process works."""

    status: Literal["alive"]


class Ready(_Answer):
    """A request sent now would be served."""

    status: Literal["ready"]


class NotReady(_Answer):
    """It would not."""

    status: Literal["not ready"]
    check: Literal["gateway", "engine", "steps", "log"]  # that failed
    detail: str
