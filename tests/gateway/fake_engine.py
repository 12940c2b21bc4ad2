"""A scheduler and worker in one, which reads the requests log and appends what a test needs."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from shared.bus.api import START, Append, Bus, EntryId
from shared.bus.keys import EngineKeys
from shared.codec import Message, decode, encode
from shared.messages.endings import EndFlag
from shared.messages.leases import PROTOCOL, EngineInfo, KVGeometry, ModelInfo
from shared.messages.logprobs import TokenLogprobs
from shared.messages.outputs import (
    BeamsEnded,
    ChoiceEnded,
    ChoiceState,
    Hypothesis,
    PromptLogprobs,
    RequestEnded,
    RequestState,
    StepResult,
)
from shared.messages.plans import EpochStarted
from shared.messages.requests import Abort, Attach, Stop, Submit


def kv_pool(num_blocks: int, block_size: int = 16) -> KVGeometry:
    """A pool of which only this matters."""
    return KVGeometry(num_blocks, block_size, bytes_per_block=4096, num_host_blocks=0)


INFO = EngineInfo(
    engine_id="engine-0",
    scheduler="fake",
    epoch=1,
    state="ready",
    detail="",
    model=ModelInfo(
        "demo",
        vocab_size=4096,
        max_model_len=256,
        dtype="float32",
        eos_token_ids=(1,),
        takes_grammars=True,
    ),
    kv=kv_pool(64),
    max_num_sequences=16,
    num_running=0,
    num_waiting=0,
    protocol=PROTOCOL,
)
_READ_MS = 1_000
_PATIENCE_S = 5.0

Reply = Callable[[Submit], Sequence[int]]
"""The tokens that a request is answered with, in all its choices; the last one ends them."""

Row = str | tuple[str, int]
"""A request's first choice, or one by its index."""


class FakeEngine:
    """Plays one epoch after another on the logs of an engine."""

    def __init__(self, bus: Bus, engine_id: str = "engine-0") -> None:
        self.bus = bus
        self.keys = EngineKeys(engine_id)
        self.epoch = 0
        self.step_number = 0
        self.handles: dict[tuple[str, int], int] = {}
        self.requests_cursor = START
        self.pending: list[Message] = []
        self.received: list[Message] = []
        self._next_handle = 1

    async def publish(self, **changes: Any) -> None:
        """Renew the engine's lease; ``changes`` by field of EngineInfo."""
        info = replace(INFO, **{"epoch": self.epoch, **changes})
        await self.bus.put(self.keys.info, encode(info), 3_600_000)

    async def start_epoch(self, epoch: int | None = None) -> None:
        """A new scheduler took over."""
        self.epoch = max(self.epoch + 1, await self.bus.now_ms()) if epoch is None else epoch
        self.step_number = 0
        self.handles.clear()
        started = encode(EpochStarted(self.epoch, "fake", ("worker",)))
        await self.bus.append(Append(self.keys.outputs, [started], self.epoch, 0))

    async def append(self, *messages: Message) -> EntryId:
        """One entry in the outputs log."""
        data = [encode(message) for message in messages]
        return await self.bus.append(Append(self.keys.outputs, data, self.epoch))

    async def append_raw(self, data: bytes) -> None:
        """Bytes that need not be a message."""
        await self.bus.append(Append(self.keys.outputs, [data], self.epoch))

    async def read(self) -> Message:
        """The next message of the requests log."""
        deadline = time.monotonic() + _PATIENCE_S
        while not self.pending:
            cursors = {self.keys.requests: self.requests_cursor}
            found = await self.bus.read(cursors, _READ_MS, 100)
            assert found or time.monotonic() < deadline, "nothing arrived in the requests log"
            for entry in found.get(self.keys.requests, ()):
                self.requests_cursor = entry.id
                self.pending += [decode(data) for data in entry.messages]
        message = self.pending.pop(0)
        self.received.append(message)
        return message

    async def read_submit(self) -> Submit:
        message = await self.read()
        assert isinstance(message, Submit), message
        return message

    async def read_stop(self) -> Stop:
        message = await self.read()
        assert isinstance(message, Stop), message
        return message

    async def read_abort(self) -> Abort:
        message = await self.read()
        assert isinstance(message, Abort), message
        return message

    async def read_attach(self) -> Attach:
        message = await self.read()
        assert isinstance(message, Attach), message
        return message

    async def accept_attach(
        self,
        attach: Attach,
        *outputs: Sequence[int],
        submit: Submit | None = None,
        ended: Mapping[int, str] | None = None,
    ) -> Submit:
        """Answer an Attach, by default with what the client has.

        Args:
            submit: as the engine has it; by default that of the Attach.
        """
        known = submit or attach.submit
        assert known is not None
        known = replace(known, gateway=attach.gateway, attachment=attach.attachment)
        if not outputs:
            outputs = tuple(view.tokens.tolist() for view in attach.views)
        if ended is None:
            reasons = {n: view.finish_reason for n, view in enumerate(attach.views)}
            ended = {number: reason for number, reason in reasons.items() if reason}
        await self.accept(known, *outputs, ended=ended)
        return known

    def state(
        self, submit: Submit, *outputs: Sequence[int], ended: Mapping[int, str] | None = None
    ) -> RequestState:
        """The state of a request, under new handles.

        Args:
            outputs: tokens of the first choices; the others have none.
            ended: reasons, by choice.
        """
        choices = []
        for number in range(submit.num_choices):
            output = outputs[number] if number < len(outputs) else ()
            reason = (ended or {}).get(number, "")
            handle = 0 if reason else self._next_handle
            self.handles[submit.request_id, number] = handle
            self._next_handle += not reason
            choices.append(ChoiceState(number, handle, np.array(output, np.int32), reason))
        return RequestState(submit, tuple(choices), str(self.requests_cursor))

    async def accept(
        self, submit: Submit, *outputs: Sequence[int], ended: Mapping[int, str] | None = None
    ) -> None:
        """Put a request's state into the log."""
        await self.append(self.state(submit, *outputs, ended=ended))

    async def accept_next(self) -> Submit:
        """Wait for a request and accept it."""
        submit = await self.read_submit()
        await self.accept(submit)
        return submit

    def result(
        self,
        tokens: Mapping[Row, int],
        ended: Mapping[Row, EndFlag] | None = None,
        logprobs: Mapping[Row, TokenLogprobs] | None = None,
        prompts: Mapping[Row, Sequence[TokenLogprobs]] | None = None,
        admitted: Mapping[Row, int] | None = None,
    ) -> StepResult:
        """The result of the next step, by choice."""
        self.step_number += 1
        rows = list(tokens)
        ended, admitted = ended or {}, admitted or {}
        return StepResult(
            step=self.step_number,
            handles=np.array([self.handle(row) for row in rows], np.int32),
            tokens=np.array([tokens[row] for row in rows], np.int32),
            ended_rows=np.array([rows.index(row) for row in ended], np.int32),
            ended_flags=np.array(list(ended.values()), np.int32),
            beams=(),
            logprobs=tuple(
                replace(scores, row=rows.index(row)) for row, scores in (logprobs or {}).items()
            ),
            prompt_logprobs=tuple(
                PromptLogprobs(self.handle(row), tuple(scores))
                for row, scores in (prompts or {}).items()
            ),
            admitted_handles=np.array([self.handle(row) for row in admitted], np.int32),
            admitted_computed=np.array(list(admitted.values()), np.int32),
            num_batched_tokens=len(rows),
            model_us=0,
            step_us=0,
        )

    def handle(self, row: Row) -> int:
        """Under which results speak of a choice."""
        return self.handles[(row, 0) if isinstance(row, str) else row]

    async def step(self, *args: Any, **kwargs: Any) -> None:
        """Execute one step, see ``result``."""
        await self.append(self.result(*args, **kwargs))

    async def generate(
        self,
        submit: Submit,
        tokens: Sequence[int],
        flag: EndFlag | None = EndFlag.LENGTH,
        choice: int = 0,
    ) -> None:
        """One step for each token; the last one ends the choice unless ``flag`` is None."""
        await self.generate_all(submit, {choice: tokens}, flag)

    async def generate_all(
        self,
        submit: Submit,
        tokens: Mapping[int, Sequence[int]],
        flag: EndFlag | None = EndFlag.LENGTH,
    ) -> None:
        """Several choices, in as many steps as the longest has tokens."""
        for position in range(max(len(some) for some in tokens.values())):
            step: dict[Row, int] = {}
            ended: dict[Row, EndFlag] = {}
            for choice, some in tokens.items():
                row = (submit.request_id, choice)
                if position < len(some):
                    step[row] = some[position]
                if flag is not None and position == len(some) - 1:
                    ended[row] = flag
            await self.step(step, ended)

    async def end_choice(self, submit: Submit, choice: int, reason: str) -> None:
        """End one choice otherwise than by a result."""
        cursor = str(self.requests_cursor)
        await self.append(ChoiceEnded(submit.request_id, choice, reason, cursor))

    async def end(self, submit: Submit, reason: str, error: str = "") -> None:
        """End a request otherwise than by a result."""
        cursor = str(self.requests_cursor)
        await self.append(RequestEnded(submit.request_id, reason, error, cursor))

    def search_state(
        self, submit: Submit, *running: Sequence[int], finished: Sequence[Sequence[int]] = ()
    ) -> RequestState:
        """The state of a beam search, under a new handle of its group if any beam runs."""
        handle = self._next_handle if running else 0
        self._next_handle += bool(running)
        self.handles[submit.request_id, 0] = handle
        beams = [
            ChoiceState(number, handle, np.array(output, np.int32), "", _sums(output))
            for number, output in enumerate(running)
        ]
        beams += [
            ChoiceState(number, 0, np.array(output, np.int32), "stop", _sums(output))
            for number, output in enumerate(finished)
        ]
        return RequestState(submit, tuple(beams), str(self.requests_cursor))

    async def accept_search(self, submit: Submit | None = None) -> Submit:
        """Accept a beam search, the next request by default."""
        submit = submit or await self.read_submit()
        await self.append(self.search_state(submit, ()))
        return submit

    async def end_search(self, submit: Submit, *found: Hypothesis) -> None:
        """The hypotheses of a beam search, which end it."""
        await self.append(BeamsEnded(submit.request_id, found, str(self.requests_cursor)))

    async def serve(self, reply: Reply, flag: EndFlag = EndFlag.LENGTH) -> None:
        """Answer every request until cancelled."""
        while True:
            message = await self.read()
            if isinstance(message, Submit):
                await self.accept(message)
                tokens = reply(message)
                choices = dict.fromkeys(range(message.num_choices), tokens)
                await self.generate_all(message, choices, flag)


def _sums(output: Sequence[int]) -> Any:
    return np.arange(1, len(output) + 1, dtype=np.float32) * np.float32(-0.5)


def hypothesis(
    tokens: Sequence[int],
    sums: Sequence[float] | None = None,
    score: float = -1.5,
    reason: str = "length",
) -> Hypothesis:
    """What a beam search found; by default each token has the log-probability -0.5."""
    scores = _sums(tokens) if sums is None else np.array(sums, np.float32)
    return Hypothesis(np.array(tokens, np.int32), scores, score, reason)


def scores(token: int, logprob: float, top: Mapping[int, float], row: int = 0) -> TokenLogprobs:
    """Log-probabilities at one position."""
    return TokenLogprobs(
        row, logprob, np.array(list(top), np.int32), np.array(list(top.values()), np.float32)
    )
