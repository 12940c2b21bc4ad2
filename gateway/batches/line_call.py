"""The answer to one line of a batch."""

import json
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import Message

from gateway.batches.body import BatchLine
from gateway.batches.line_requests import LineRequests
from gateway.batches.records import BatchState
from gateway.batches.validation import CALLER
from gateway.engine.backoff import Backoff
from gateway.http.call import Call
from gateway.http.errors import OTHER_BODY, TAKEN_OVER, UNKNOWN_MODEL, ApiError, failed
from gateway.openai.generation.generation import TakenOver
from gateway.openai.generation.origin import Origin
from gateway.openai.responses.answers import reason_of, whole_body
from gateway.openai.responses.serializer import Usage
from gateway.service import Service
from shared.logs import EventLog
from shared.messages.endings import FinishReason

_log = EventLog("gateway.batches.line_call")
_LOWEST_PRIORITY = 2**31 - 1
_LATER = (429, 503)  # the same request may succeed later
_NO_USAGE = Usage(0, 0, 0)


@dataclass(frozen=True, slots=True)
class LineResult:
    """What became of a line.

    Attributes:
        data: the line for the file of answers, or of errors.
    """

    is_answer: bool
    data: bytes
    usage: Usage = _NO_USAGE


class LineCall:
    """Answers one line, however often engine and gateways die meanwhile.

    Args:
        goes_on: whether the engine is to go on when this gateway stops waiting.
    """

    def __init__(
        self,
        service: Service,
        requests: LineRequests,
        state: BatchState,
        number: int,
        goes_on: Callable[[], bool],
    ) -> None:
        self._service = service
        self._requests = requests
        self._state = state
        self._number = number
        self._goes_on = goes_on

    async def run(self, line: BatchLine) -> LineResult:
        """The result, as soon as there is one.

        Raises:
            TakenOver: another gateway answers it.
        """
        backoff = Backoff()
        while True:
            call = Call(tenant=self._state.tenant)
            try:
                shown, usage = await self._attempt(call, json.dumps(line.body).encode())
            except ApiError as error:
                if error.code == TAKEN_OVER:
                    raise TakenOver from None
                if _may_succeed_later(error) or self._was_served(error, line):
                    await backoff.wait()
                    continue
                shown = json.dumps(error.body()).encode()
                return LineResult(False, answered_line(line, call.id, error.status, shown))
            except TakenOver:
                raise
            except Exception:
                _log.exception("line failed", id=self._state.id, line=self._number + 1)
                shown = json.dumps(failed("internal error", "internal_error").body()).encode()
                return LineResult(False, answered_line(line, call.id, 500, shown))
            return LineResult(True, answered_line(line, call.id, 200, shown), usage)

    def _was_served(self, error: ApiError, line: BatchLine) -> bool:
        """Whether the model has left since the file was checked; it may come back."""
        return error.code == UNKNOWN_MODEL and line.model in self._state.models

    async def _attempt(self, call: Call, body: bytes) -> tuple[bytes, Usage]:
        state = self._state
        key = f"batch\n{state.id}\n{self._number}"  # no header can hold it
        origin = Origin(call, CALLER, state.tenant, key, _LOWEST_PRIORITY, _never)
        prepared, serializer = await self._requests.prepare(state.endpoint, origin, body)
        generation = prepared.generation
        await prepared.submit(self._service.models)
        has_ended = False
        try:
            shown = await whole_body(generation, serializer)
            has_ended = True
        except BaseException as error:
            has_ended = isinstance(error, ApiError) and not _may_succeed_later(error)
            reason = reason_of(error) if has_ended else FinishReason.ABORT
            generation.output.count_unfinished(reason)
            raise
        finally:
            generation.close(abort=has_ended or not self._goes_on())
        return shown, generation.output.usage


def answered_line(line: BatchLine, call_id: str, status: int, body: bytes) -> bytes:
    """The line of a file for a line of the input that has an answer, or a refusal.

    Args:
        body: of the response, as JSON.
    """
    head = json.dumps({"id": f"batch_req_{call_id}", "custom_id": line.custom_id})[:-1]
    response = json.dumps({"status_code": status, "request_id": call_id})[:-1]
    return f'{head}, "response": {response}, "body": '.encode() + body + b'}, "error": null}\n'


def skipped_line(custom_id: str, number: int, state: BatchState, code: str, why: str) -> bytes:
    """The line of the file of errors for a line of the input that is not answered at all."""
    shown = {
        "id": f"batch_req_{state.id.removeprefix('batch_')}-{number}",
        "custom_id": custom_id,
        "response": None,
        "error": {"code": code, "message": why},
    }
    return json.dumps(shown).encode() + b"\n"


def _may_succeed_later(error: ApiError) -> bool:
    """Whether the engine is to be asked again.

    A request from another body of the same line was made by a gateway of another version; the
    engine forgets it after a while.
    """
    return error.status in _LATER or error.code in (TAKEN_OVER, OTHER_BODY)


async def _never() -> Message:
    raise AssertionError("no connection belongs to a batch")
