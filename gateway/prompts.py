"""From what clients send to prompt tokens, without holding up other requests."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, cast

from gateway.admission import Prompt
from gateway.chats import DEFAULT_LIMIT_S, ChatRenderer
from gateway.control_tokens import TemplateRefused
from gateway.errors import invalid
from gateway.schema import ChatMessage, ChatTool, CompletionBody
from gateway.tokenizer import Tokenizer

# Below, encoding takes less than handing it to a thread and back.
_INLINE_CHARS = 4_000
_PIECE_CHARS = 100  # a prompt costs so much, however short it is
_THREADS = 2

_T = TypeVar("_T")


class PromptReader:
    """Turns bodies into prompts, the long ones on threads of its own."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_prompts: int,
        template_timeout_s: float = DEFAULT_LIMIT_S,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_prompts = max_prompts
        self._threads = ThreadPoolExecutor(_THREADS, "tokenize")
        self._chats = ChatRenderer(tokenizer, template_timeout_s)

    def count(self, body: CompletionBody) -> int:
        """Prompts of a completion.

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

    async def completion(self, body: CompletionBody) -> list[Prompt]:
        """The prompts of a completion, one for each request."""
        given = body.prompt
        if isinstance(given, str):
            return [await self._from_text(given, "prompt", len(given))]
        if isinstance(given[0], int):
            return [self._from_tokens(given, "prompt")]
        # Many short ones are as much work as a long one.
        size = sum(_PIECE_CHARS + len(item) for item in given if isinstance(item, str))
        return [
            await self._from_text(item, f"prompt[{index}]", size)
            if isinstance(item, str)
            else self._from_tokens(cast("list[int]", item), f"prompt[{index}]")
            for index, item in enumerate(given)
        ]

    async def chat(
        self, messages: Sequence[ChatMessage], tools: Sequence[ChatTool] | None = None
    ) -> Prompt:
        """The prompt that asks for the next turn of a conversation."""
        tokens = await self.chat_tokens(messages, tools, add_generation_prompt=True)
        return Prompt(tokens, None, "messages")

    async def chat_tokens(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ChatTool] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Tokens of a conversation."""
        if not self._tokenizer.has_chat_template:
            raise invalid("messages", "this model has no chat template; use /v1/completions")
        encode = self._tokenizer.encode_chat
        try:
            chat = await self._chats.rendered(messages, tools, add_generation_prompt)
            # The encoder for messages that name control tokens is made when it is first needed.
            size = _INLINE_CHARS + 1 if chat.names_others else len(chat.text)
            return await self._run(size, lambda: encode(chat))
        except TemplateRefused as error:
            reason = f"the chat template refuses these messages: {error}"
            raise invalid("messages", reason) from None

    async def text_tokens(self, text: str, add_special_tokens: bool) -> list[int]:
        """Tokens of a text."""
        return await self._encoded(text, add_special_tokens, len(text))

    async def text(self, tokens: Sequence[int], skip_special: bool) -> str:
        """Text of tokens."""
        decode = self._tokenizer.decode
        return await self._run(4 * len(tokens), lambda: decode(tokens, skip_special))

    async def token_strs(self, tokens: Sequence[int]) -> list[str]:
        """Text of each token by itself."""
        name = self._tokenizer.token_bytes
        return await self._run(
            4 * len(tokens), lambda: [name(token).decode(errors="replace") for token in tokens]
        )

    def close(self) -> None:
        """Give the threads up; nothing may be asked afterwards."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._chats.close()

    async def _from_text(self, text: str, path: str, size: int) -> Prompt:
        tokens = await self._encoded(text, add_special_tokens=True, size=size)
        return Prompt(self._never_empty(tokens), text, path)

    async def _encoded(self, text: str, add_special_tokens: bool, size: int) -> list[int]:
        encode = self._tokenizer.encode
        return await self._run(size, lambda: encode(text, add_special_tokens))

    def _from_tokens(self, tokens: list[int], path: str) -> Prompt:
        return Prompt(self._never_empty(tokens), None, path)

    def _never_empty(self, tokens: list[int]) -> list[int]:
        bos = self._tokenizer.bos_token_id
        return [bos] if not tokens and bos is not None else tokens

    async def _run(self, size: int, work: Callable[[], _T]) -> _T:
        if size <= _INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
