"""How an answer is shown: stored with its requests, for a gateway that takes them over."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gateway.answers.answer_formats import id_chars
from gateway.answers.options import AnswerOptions
from gateway.openai.requests.output_options import OutputOptions
from gateway.openai.requests.schema import CompletionBody, GenerationBody
from gateway.openai.responses.chat_serializer import CallIds, ChatSerializer
from gateway.openai.responses.completion_serializer import CompletionSerializer
from gateway.openai.responses.serializer import AnswerHead, Serializer
from gateway.text.tokenizer import Tokenizer
from shared.codec import Message, decode_as, encode, message
from shared.errors import DecodeError

# Fields that change how an answer is sent, and not what it is.
_OF_TRANSPORT = {"stream", "stream_options", "stream_resume"}


@message
@dataclass(frozen=True, slots=True, eq=False)
class Display(Message):
    """How the answer to one prompt of a call is shown; the engine stores it unread."""

    call_id: str
    is_chat: bool
    model: str  # as clients name it
    created: int  # seconds since 1970
    num_prompts: int
    prompt_text: str | None  # as the client gave it, if it is to be echoed
    output: OutputOptions  # what is shown of the tokens
    include_usage: bool
    resumable: bool
    fingerprint: str  # of the body, if it can be repeated; "" otherwise
    num_prompt_tokens: int = 0  # of all prompts together; 0: written by an older version
    continuous_usage: bool = False  # every chunk of a stream has the usage so far
    scored_token: int | None = None  # the prompt's last token, which the engine generates
    answers: AnswerOptions | None = None  # how texts are parsed; None: they are not

    def packed(self, prompt_text: str | None, scored_token: int | None = None) -> bytes:
        """Encoded for the Submit of one prompt."""
        text = prompt_text if self.output.echo else None
        return encode(replace(self, prompt_text=text, scored_token=scored_token))

    def serializer(self, tokenizer: Tokenizer, prompts: Sequence[list[int]]) -> Serializer:
        """The serializer of the answer; ``prompts`` are the tokens of each prompt."""
        head = AnswerHead(
            id=f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.call_id}",
            model=self.model,
            created=self.created,
            include_usage=self.include_usage,
            token_ids=self.output.token_ids,
            prompt_tokens=[tokens for tokens in prompts for _ in range(self.output.num_choices)],
        )
        if not self.is_chat:
            return CompletionSerializer(head, tokenizer)
        chars = 0 if self.answers is None else id_chars(self.answers.calls)
        return ChatSerializer(head, tokenizer, CallIds(self.call_id, chars))


def read_display(data: bytes) -> Display | None:
    """Decodes what ``packed`` wrote; None for anything else."""
    try:
        display: Display = decode_as(Display, data)
    except DecodeError:
        return None
    return display


def request_id(call_id: str, position: int) -> str:
    """Id of the request for one prompt of a call, 128 bits in hex."""
    if position == 0:
        return call_id
    seed = f"{call_id}/{position}".encode()
    return hashlib.blake2b(seed, digest_size=16, person=b"prompt").hexdigest()


def seed_of(call_id: str) -> int:
    """The seed of a repeatable call that gave none: the same for every repetition."""
    seed = hashlib.blake2b(bytes.fromhex(call_id), digest_size=8, person=b"seed").digest()
    return int.from_bytes(seed) >> 1


def fingerprint(body: GenerationBody) -> str:
    """A digest that is equal for bodies that ask for the same answer."""
    kind = "completion" if isinstance(body, CompletionBody) else "chat"
    asked = json.dumps([kind, body.model_dump(exclude=_OF_TRANSPORT)], sort_keys=True)
    return hashlib.blake2b(asked.encode(), digest_size=16).hexdigest()
