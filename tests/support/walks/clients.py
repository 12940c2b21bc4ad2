"""The clients of a random walk: their requests, and what the outputs log has of them.

Tokens are a pure function of (client, choice, position); those of beams of all tokens before them.
So each token is distinguishable: a lost, repeated or misdirected one is detected.
"""

from dataclasses import dataclass, field
from functools import cached_property

from scheduler_svc.core.config import SchedulerConfig
from shared.messages.endings import EndFlag, FinishReason
from shared.messages.outputs import Hypothesis
from shared.messages.requests import Submit
from tests.support.walks.beams import Search, tag_after

VOCABULARY = 997  # tokens


@dataclass(slots=True)
class Choice:
    """One choice of a request, as the log has it."""

    output: list[int] = field(default_factory=list)
    reason: str = ""  # FinishReason, once it has ended
    by_flag: bool = False  # ended by a result, which the scheduler may have read only later
    stopped_at: int | None = None  # tokens up to the stop string that its gateway found

    def restate(self, output: list[int], reason: str) -> None:
        """Check that a RequestState has exactly the known state.

        Of a stopped choice it may have less: the log may hold results that came while the scheduler
        stopped it, and that are not needed.
        """
        is_shorter = self.stopped_at is not None and len(output) >= self.stopped_at
        if is_shorter and reason == FinishReason.STOP:
            assert output == self.output[: len(output)]
            self.output = output
            self.reason = reason
        assert (output, reason) == (self.output, self.reason)


@dataclass
class Client:
    """A request and its results."""

    number: int  # order of arrival, from 1; it is the seed of the request's sampling
    submit: Submit
    flavour: int | None  # clients of one flavour sample the same tokens; None: no flavour
    stop_period: int  # one token in so many ends its sequence
    max_output: int  # tokens that each choice may generate
    choices: list[Choice]
    is_accepted: bool = False
    is_aborted: bool = False  # the client has disconnected
    is_refused: bool = False

    @property
    def rank(self) -> tuple[int, int]:
        """Rank in the queue; lower is served earlier."""
        return (self.submit.priority, self.number)

    @cached_property
    def search(self) -> Search | None:
        """Its beam search, as far as it is in the log."""
        params = self.submit.sampling.beams
        if params is None:
            return None
        return Search(params, self.prompt_tag, self.stop_period, self.max_output, VOCABULARY)

    @property
    def running(self) -> list[Choice]:
        """Choices that have not ended."""
        return [choice for choice in self.choices if not choice.reason]

    @property
    def has_ended(self) -> bool:
        """Whether all choices have ended."""
        return all(choice.reason for choice in self.choices)

    @cached_property
    def first_tag(self) -> int:
        """The tag before the first token: other salts must never see the same content."""
        return sum(map(ord, self.submit.cache_salt))

    @cached_property
    def prompt_tag(self) -> int:
        """The tag of the prompt's last token."""
        tag = self.first_tag
        for token in self.submit.prompt.tolist():
            tag = tag_after(tag, token)
        return tag

    def draw(self, choice: int, position: int) -> tuple[int, EndFlag | None]:
        """The token at this position of prompt and output, and whether it is the last."""
        who = self.number * 31 + choice if self.flavour is None else -self.flavour
        token = (who * 7919 + position * 104_729) % VOCABULARY
        if token % self.stop_period == 0:
            return token, EndFlag.STOP
        is_last = position - len(self.submit.prompt) + 1 == self.max_output
        return token, EndFlag.LENGTH if is_last else None

    # ---------------------------------------------------------- what is in the log

    def take(self, number: int, token: int, flag: int | None) -> None:
        """Record a result's token of a choice; tokens after its end are ignored."""
        choice = self.choices[number]
        if choice.reason:
            return
        position = len(self.submit.prompt) + len(choice.output)
        expected = self.draw(number, position)
        assert (token, flag) == expected, f"{self.where(number)}: {token}, {flag} for {expected}"
        choice.output.append(token)
        if flag is not None:
            choice.reason = EndFlag(flag).finish_reason()
            choice.by_flag = True

    def end(self, number: int, reason: str) -> None:
        """End a choice by another message than a flag; an earlier flag takes precedence."""
        choice = self.choices[number]
        if choice.by_flag:
            return
        assert not choice.reason, f"{self.where(number)} ends twice: {choice.reason}, {reason}"
        assert choice.stopped_at is not None, f"no gateway has stopped {self.where(number)}"
        choice.reason = reason

    def end_all(self, reason: str) -> None:
        """End the request by another message than flags."""
        late = any(choice.by_flag for choice in self.choices)
        assert self.running or late, f"{self.submit.request_id} ends twice, now by {reason}"
        assert self.is_aborted or reason != FinishReason.ABORT, f"no client has left: {self.submit}"
        for choice in self.running:
            assert choice.stopped_at is not None or reason != FinishReason.STOP
            choice.reason = reason

    def end_beams(self, hypotheses: tuple[Hypothesis, ...]) -> None:
        """End the beam search."""
        assert self.search is not None, f"{self.submit.request_id} has no beams"
        assert len(hypotheses) == len(self.choices), f"{len(hypotheses)} of {len(self.choices)}"
        assert self.running == self.choices, f"{self.submit.request_id} ends twice"
        self.search.check_end(hypotheses)
        for choice, hypothesis in zip(self.choices, hypotheses, strict=True):
            choice.output, choice.reason = hypothesis.tokens.tolist(), hypothesis.finish_reason

    def where(self, choice: int) -> str:
        """A description for messages."""
        return f"choice {choice} of {self.submit.request_id}"


def blocks_needed(config: SchedulerConfig, submit: Submit, max_output: int) -> int:
    """Blocks without which a request cannot run even alone, if all its choices differ."""
    shared = (len(submit.prompt) - 1) // config.block_size
    each = -(-(len(submit.prompt) + max_output - 1) // config.block_size)
    return shared + submit.num_choices * (each - shared)


def may_refuse(config: SchedulerConfig, client: Client) -> bool:
    """Whether the request can never run."""
    submit = client.submit
    return (
        len(submit.prompt) == 0
        or client.max_output < 1
        or submit.num_choices > config.max_num_sequences
        or 0 < config.max_tenant_sequences < submit.num_choices
        or blocks_needed(config, submit, client.max_output) > config.num_blocks
    )


def check_ending(client: Client) -> None:
    """Check that an ended request has all tokens for its reason, and no others."""
    for number, choice in enumerate(client.choices):
        if choice.reason == FinishReason.LENGTH:
            assert len(choice.output) == client.max_output, client.where(number)
        if choice.reason == FinishReason.ERROR:
            assert client.is_refused, client.where(number)
