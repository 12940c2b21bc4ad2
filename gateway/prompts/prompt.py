"""The prompt of one request: tokens, and the text that they come from."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of one request."""

    tokens: list[int]
    text: str | None  # as the client gave it, None if it gave tokens
    path: str  # field of the body that it came from
    scores_last: bool = False  # the engine generates its last token, see prompt_length

    @property
    def engine_tokens(self) -> list[int]:
        """Tokens that the engine gets as the prompt."""
        return self.tokens[:-1] if self.scores_last else self.tokens

    @property
    def scored_token(self) -> int | None:
        """The last token if the engine generates it."""
        return self.tokens[-1] if self.scores_last else None
