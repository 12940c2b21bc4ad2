"""The parts of an answer from its tokens, one token after the other.

Fed this way, the parts depend on the tokens alone, and not on how many of them arrive together.
"""

from collections.abc import Iterator, Sequence

from gateway.answers.answer_formats import id_chars
from gateway.models.served_model import ServedModel
from gateway.openai.generation.generation_output import GenerationOutput
from gateway.openai.responses.chat_serializer import CallIds
from gateway.prompts.prompt import Prompt
from gateway.resume.stream_context import read_display
from gateway.text.choice_text import Delta
from shared.errors import DecodeError
from shared.messages.endings import FinishReason
from shared.messages.logprobs import TokenLogprobs
from shared.messages.requests import Submit


class TokenFeed:
    """Reads the only choice of a request.

    Args:
        submit: with the end of its prompt at least.

    Attributes:
        display: how the answer is shown.
        num_tokens: that were fed.

    Raises:
        DecodeError: another version of the gateway wrote it.
    """

    def __init__(self, model: ServedModel, submit: Submit) -> None:
        display = read_display(submit.display)
        if display is None:
            raise DecodeError("how the response is shown cannot be read")
        prompt = Prompt(submit.prompt.tolist(), None, "prompt")
        self._output = GenerationOutput(
            model.tokenizer, model.metrics, display, [prompt], [submit], 0.0, model.answers
        )
        self._choice = self._output.choices[0]
        self.display = display
        self.num_tokens = 0

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self._output.usage.prompt_tokens

    @property
    def num_reasoning(self) -> int:
        """Tokens of reasoning that were fed."""
        return self._choice.text.num_reasoning

    @property
    def call_ids(self) -> CallIds:
        """Ids of the calls of tools in the answer."""
        answers = self.display.answers
        return CallIds(self.display.call_id, 0 if answers is None else id_chars(answers.calls))

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it; None: another end, or none."""
        return self._choice.text.stop_string

    @property
    def has_ended(self) -> bool:
        """A stop string, or a call, has ended it."""
        return self._choice.text.finish_reason is not None

    def push(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()
    ) -> Iterator[Delta]:
        """What each token adds, as far as it shows."""
        text = self._choice.text
        for index, token in enumerate(tokens):
            if self.has_ended:
                return
            text.push([token], logprobs[index : index + 1])
            self.num_tokens += 1
            delta = text.take()
            if delta is not None:
                yield delta

    def end(self, reason: FinishReason) -> Delta | None:
        """What was held back; None for nothing."""
        self._choice.text.end(reason)
        return self._choice.text.take()
