"""Encodes a chat so that only the control tokens that its template wrote become control tokens."""

import json
import secrets
from collections.abc import Collection, Mapping
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from gateway.prompts.control_tokens import RenderedChat, TemplateRefused

_FIRST_PRIVATE = 0xF0000  # plane 15 has characters for private use
_NUM_PRIVATE = 0xFFFD
_SECRET_CHARS = 8


class LiteralTextEncoder:
    """A second tokenizer of the same model that encodes names of control tokens as plain text.

    Where the template wrote control tokens, the text gets secret names instead, which only this
    tokenizer has. So the text is normalized, split and merged just as in the first tokenizer, also
    where a message and the template's text around it form one token.

    Args:
        backend: the model's tokenizer.
        control: names of its control tokens.
    """

    def __init__(self, backend: Any, control: Collection[str]) -> None:
        state = json.loads(backend.to_str())
        known = {item["content"]: item for item in state["added_tokens"]}
        for name in control:
            known[name]["special"] = True  # so that `encode_special_tokens` applies to it
        self._encoder = Backend.from_str(json.dumps(state))
        self._encoder.encode_special_tokens = True
        names = {name: self._secret_name() for name in control}
        self._encoder.add_tokens([_alias(known[name], names[name]) for name in control])
        self._secret_names: Mapping[str, str] = names
        self._control_ids = {backend.token_to_id(name): name for name in control}
        self._real_ids = {
            self._encoder.token_to_id(alias): backend.token_to_id(name)
            for name, alias in names.items()
        }

    def encode(self, chat: RenderedChat) -> list[int]:
        """Token ids of a conversation.

        Raises:
            TemplateRefused: this tokenizer makes a control token of plain text even so.
        """
        pieces, end = [], 0
        for span in chat.control or ():
            pieces += [chat.text[end : span.start], self._secret_names[span.name]]
            end = span.end
        text = "".join([*pieces, chat.text[end:]])
        ids = self._encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids
        for token in ids:
            if token in self._control_ids:
                name = self._control_ids[token]
                raise TemplateRefused(f"{name} is a control token, and cannot be read as text here")
        return [self._real_ids.get(token, token) for token in ids]

    @staticmethod
    def _secret_name() -> str:
        chars = (secrets.randbelow(_NUM_PRIVATE) for _ in range(_SECRET_CHARS))
        return "".join(chr(_FIRST_PRIVATE + char) for char in chars)


def _alias(known: Mapping[str, Any], name: str) -> AddedToken:
    return AddedToken(
        name,
        single_word=False,
        lstrip=known["lstrip"],
        rstrip=known["rstrip"],
        normalized=known["normalized"],
        special=False,
    )
