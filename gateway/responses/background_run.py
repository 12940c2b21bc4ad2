"""Finishes one response that no client waits for."""

import secrets
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

from gateway.engine.backoff import Backoff
from gateway.http.errors import ApiError
from gateway.jobs.claims import run_claimed
from gateway.models.served_model import ServedModel
from gateway.openai.generation.generation import Generation, TakenOver
from gateway.openai.generation.generation_output import GenerationOutput
from gateway.prompts.prompt import Prompt
from gateway.responses.records import ResponseAsked, ResponseEnded
from gateway.responses.store import ResponseLog, tokens_message
from gateway.resume.stream_context import Display, read_display
from gateway.service import Service
from gateway.text.choice_text import Delta
from shared.errors import BusUnavailable, DecodeError
from shared.logs import EventLog
from shared.messages.endings import FinishReason
from shared.messages.logprobs import TokenLogprobs
from shared.messages.requests import Submit

_log = EventLog("gateway.responses.background_run")
_LATER = (429, 503)  # the same request may succeed later


def display_of(asked: ResponseAsked) -> Display:
    """How a response is shown.

    Raises:
        DecodeError: another version of the gateway wrote it.
    """
    display = read_display(asked.submit.display)
    if display is None:
        raise DecodeError("how the response is shown cannot be read")
    return display


class BackgroundRun:
    """One claimed response.

    It goes on behind the tokens that the log has. So a gateway that claims it after another has
    died generates the same answer, whatever the engine remembers of it.
    """

    def __init__(self, service: Service, log: ResponseLog) -> None:
        self._service = service
        self._log = log
        self._tokens = list(log.stored.tokens)
        self._num_written = len(self._tokens)
        self._logprobs: list[TokenLogprobs] = []  # of tokens that are not written

    async def run(self) -> None:
        """Generate what is missing, and write the end.

        Raises:
            StaleWriter: another gateway has claimed it, or it was cancelled or deleted.
            BusUnavailable: Redis does not answer; what was not written is generated again.
        """
        ended = await run_claimed(self._log, self._generate(), self._flush)
        if ended is not None:
            await self._log.end(ended)
            _log.info("response ended", id=self._log.id, reason=ended.reason)

    async def _generate(self) -> ResponseEnded | None:
        """Generate to the end; None: another gateway does."""
        backoff = Backoff()
        while True:
            try:
                ended = await self._attempt()
            except TakenOver:
                return None
            except ApiError as error:
                if self._service.draining:
                    return None
                if error.status not in _LATER:
                    code, now_s = error.code or "server_error", int(time.time())
                    return ResponseEnded(FinishReason.ERROR, now_s, 0, str(error), code)
                await backoff.wait()
            else:
                return ended

    async def _attempt(self) -> ResponseEnded:
        asked = self._log.stored.asked
        assert asked is not None
        display = display_of(asked)
        model = self._service.models.kept(display.model)
        output = self._output(model, display, asked.submit)
        generation = Generation(model.engine, model.metrics, output)
        generation.attach_behind(self._tokens)
        goes_on = False
        reason = output.choices[0].text.finish_reason
        try:
            if reason is None:
                await generation.accepted()
                async with aclosing(generation.deltas()) as deltas:
                    async for new in deltas:
                        for _, delta in new:
                            self._take(delta)
                            reason = delta.finish_reason or reason
            assert reason is not None
            return ResponseEnded(reason.value, int(time.time()), output.cached_tokens)
        except BaseException as error:
            goes_on = self._goes_on(error)
            output.count_unfinished(FinishReason.ABORT)
            raise
        finally:
            generation.close(abort=not goes_on)

    def _goes_on(self, error: BaseException) -> bool:
        """Whether the engine is to go on, for this gateway later, or for another one."""
        if self._service.draining or isinstance(error, TakenOver | BusUnavailable):
            return True
        return isinstance(error, ApiError) and error.status in _LATER

    def _output(self, model: ServedModel, display: Display, asked: Submit) -> GenerationOutput:
        attachment = secrets.token_hex(8)
        submit = replace(asked, gateway=self._service.instance, attachment=attachment)
        return GenerationOutput(
            model.tokenizer,
            model.metrics,
            display,
            [Prompt(submit.prompt.tolist(), None, "prompt")],
            [submit],
            time.monotonic(),
            model.answers,
        )

    def _take(self, delta: Delta) -> None:
        self._tokens += delta.token_ids
        self._logprobs += [item.scores for item in delta.scored if item.scores is not None]

    async def _flush(self) -> None:
        """Write what is new."""
        new: Sequence[int] = self._tokens[self._num_written :]
        if new:
            logprobs, self._logprobs = self._logprobs, []
            self._num_written += len(new)
            await self._log.add(tokens_message(new, logprobs))
