"""Tokenizes the prompts and conversations of bodies without blocking the event loop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

from gateway.http.errors import invalid, too_long
from gateway.openai.requests.messages import ChatMessage, ChatTool
from gateway.openai.requests.schema import CompletionBody
from gateway.prompts.control_tokens import TemplateRefused
from gateway.prompts.conversations import DEFAULT_LIMIT_S, ChatRenderer
from gateway.prompts.fair_threads import FairThreads
from gateway.prompts.prompt import Prompt
from gateway.prompts.template_options import DEFAULT_TEMPLATE_OPTIONS, TemplateOptions
from gateway.text.memory_release import release_free_memory
from gateway.text.tokenizer import Tokenizer

# Up to here, encoding takes less time than passing it to a thread.
_INLINE_CHARS = 4_000
_DECODED_CHARS = 4  # decoding a token takes as long as encoding so many characters
_PIECE_CHARS = 100  # likewise the fixed cost of a prompt
_THREADS = 3
_THREADS_PER_CALLER = 2  # one is left for other callers

_LARGE_CHARS = 2**18  # tokenizing as many takes far longer than releasing memory
_MAX_CHARS = 4 * 2**20

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class TokenizeOptions:
    """How a text is tokenized.

    Attributes:
        caller: threads are shared fairly between callers.
        max_tokens: texts that are certainly longer are refused before they are tokenized; None:
            no limit.
    """

    caller: str = ""
    max_tokens: int | None = None


DEFAULT_OPTIONS = TokenizeOptions()


class PromptReader:
    """Turns bodies into prompts, long ones on threads.

    Args:
        max_prompts: in one call.
        template_timeout_s: time limit of a chat template.
        max_chars: in all prompts or messages of one call together.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_prompts: int,
        template_timeout_s: float = DEFAULT_LIMIT_S,
        max_chars: int = _MAX_CHARS,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_prompts = max_prompts
        self._max_chars = max_chars
        self._threads = FairThreads(_THREADS, _THREADS_PER_CALLER, "tokenize")
        self._chats = ChatRenderer(tokenizer, template_timeout_s)

    def count(self, body: CompletionBody) -> int:
        """The number of prompts of a completion.

        Raises:
            ApiError: 400, there are too many.
        """
        given = body.prompt
        if isinstance(given, str) or not given or isinstance(given[0], int):
            return 1
        if len(given) > self._max_prompts:
            raise invalid(
                "prompt", f"prompt: {len(given)} prompts; at most {self._max_prompts} in one call"
            )
        return len(given)

    async def completion(
        self, body: CompletionBody, options: TokenizeOptions = DEFAULT_OPTIONS
    ) -> list[Prompt]:
        """The prompts of a completion, one for each request.

        Raises:
            ApiError: 400, a text is too long.
        """
        given = body.prompt
        if isinstance(given, str):
            self._check_chars("prompt", len(given))
            return [await self._from_text(given, "prompt", len(given), options)]
        if isinstance(given[0], int):
            return [self._from_tokens(given, "prompt")]
        # Many short prompts are as much work as a long one.
        texts = [item for item in given if isinstance(item, str)]
        num_chars = sum(map(len, texts))
        self._check_chars("prompt", num_chars)
        size = num_chars + _PIECE_CHARS * len(texts)
        return [
            await self._from_text(item, f"prompt[{index}]", size, options)
            if isinstance(item, str)
            else self._from_tokens(cast("list[int]", item), f"prompt[{index}]")
            for index, item in enumerate(given)
        ]

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ChatTool] | None = None,
        options: TokenizeOptions = DEFAULT_OPTIONS,
        template: TemplateOptions = DEFAULT_TEMPLATE_OPTIONS,
    ) -> Prompt:
        """The prompt for the next message of a conversation."""
        tokens = await self.chat_tokens(messages, tools, options, template)
        return Prompt(tokens, None, "messages")

    async def chat_tokens(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ChatTool] | None = None,
        options: TokenizeOptions = DEFAULT_OPTIONS,
        template: TemplateOptions = DEFAULT_TEMPLATE_OPTIONS,
    ) -> list[int]:
        """Tokens of a conversation.

        Raises:
            ApiError: 400, it is too long, or the model or its template does not accept it.
        """
        if not self._tokenizer.has_chat_template:
            raise invalid("messages", "this model has no chat template; use /v1/completions")
        self._check_chars("messages", sum(map(_num_chars, messages)))

        try:
            chat = await self._chats.rendered(messages, tools, template, options.caller)

            def encode() -> list[int]:
                self._check_length("messages", chat.text, options)
                return self._tokenizer.encode_chat(chat)

            # LiteralTextEncoder, which takes long to build, is built when it is first needed.
            size = _INLINE_CHARS + 1 if chat.has_literal_names else len(chat.text)
            return await self._run(size, encode, options)
        except TemplateRefused as error:
            reason = f"the chat template refuses these messages: {error}"
            raise invalid("messages", reason) from None

    async def text_tokens(
        self, text: str, add_special_tokens: bool, options: TokenizeOptions = DEFAULT_OPTIONS
    ) -> list[int]:
        """Tokens of a text.

        Raises:
            ApiError: 400, it is too long.
        """
        self._check_chars("prompt", len(text))
        return await self._encoded(text, add_special_tokens, len(text), options)

    async def text(
        self, tokens: Sequence[int], skip_special: bool, options: TokenizeOptions = DEFAULT_OPTIONS
    ) -> str:
        """Text of tokens."""
        decode = self._tokenizer.decode
        size = _DECODED_CHARS * len(tokens)
        return await self._run(size, lambda: decode(tokens, skip_special), options)

    def close(self) -> None:
        """Stop the threads; no other method may be called afterwards."""
        self._threads.close()
        self._chats.close()

    async def _from_text(self, text: str, path: str, size: int, options: TokenizeOptions) -> Prompt:
        self._check_length(path, text, options)
        tokens = await self._encoded(text, True, size, options)
        return Prompt(self._never_empty(tokens), text, path)

    async def _encoded(
        self, text: str, add_special_tokens: bool, size: int, options: TokenizeOptions
    ) -> list[int]:
        encode = self._tokenizer.encode
        return await self._run(size, lambda: encode(text, add_special_tokens), options)

    def _check_chars(self, path: str, num_chars: int) -> None:
        """Refuse text beyond the limit of a call."""
        if num_chars > self._max_chars:
            raise too_long(
                f"{path}: {num_chars} characters; at most {self._max_chars} in one call", path
            )

    def _check_length(self, path: str, text: str, options: TokenizeOptions) -> None:
        """Refuse a text that certainly has too many tokens."""
        bound, limit = self._tokenizer.text_bound, options.max_tokens
        # Cheap test first: most texts are far below the limit.
        if bound is None or limit is None or len(text) <= limit * bound.chars_per_token:
            return
        least = bound.min_tokens(text)
        if least > limit:
            raise too_long(
                f"{path} has {len(text)} characters, which are at least {least} tokens; the "
                f"model's context is {limit} tokens, prompt and output together",
                path,
            )

    def _from_tokens(self, tokens: list[int], path: str) -> Prompt:
        return Prompt(self._never_empty(tokens), None, path)

    def _never_empty(self, tokens: list[int]) -> list[int]:
        bos = self._tokenizer.bos_token_id
        return [bos] if not tokens and bos is not None else tokens

    async def _run(self, size: int, work: Callable[[], _T], options: TokenizeOptions) -> _T:
        if size <= _INLINE_CHARS:
            return work()
        if size >= _LARGE_CHARS:
            work = partial(_then_release_memory, work)
        return await self._threads.run(options.caller, work)


def _then_release_memory(work: Callable[[], _T]) -> _T:
    """Run ``work``, then release the 100 to 200 bytes a character that tokenizing needed."""
    try:
        return work()
    finally:
        release_free_memory()


def _num_chars(message: ChatMessage) -> int:
    content = message.content or ""
    reasoning = len(message.reasoning_content or message.reasoning or "")
    if isinstance(content, str):
        return len(content) + reasoning
    return sum(len(part.text) for part in content) + reasoning
