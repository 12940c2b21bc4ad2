"""The gateways of a random walk, which pass the outputs log on to clients."""

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.recovery import Recovery
from shared.bus.api import START, EntryId
from shared.codec import Message
from shared.messages.endings import FinishReason
from shared.messages.outputs import BeamsEnded, ChoiceEnded, RequestEnded, RequestState, StepResult
from tests.support.walks.clients import Client, may_refuse


class Gateways:
    """Follow the log from its beginning.

    Args:
        clients: by number, from 1; ``submit`` adds to them.

    Attributes:
        by_id: the clients by request id.
    """

    def __init__(self, clients: list[Client]) -> None:
        self.by_id: dict[str, Client] = {}
        self._clients = clients
        self._handles: dict[int, tuple[Client, int]] = {}
        self._searches: dict[int, Client] = {}  # by handle
        self._prefix_handles: set[int] = set()  # handles

    def submit(self, client: Client) -> None:
        """Add a new client."""
        self._clients.append(client)
        self.by_id[client.submit.request_id] = client

    def ignore(self, handle: int) -> None:
        """No client has asked for what is computed under this handle."""
        self._prefix_handles.add(handle)

    def begin_epoch(self, config: SchedulerConfig) -> None:
        """Drop all handles, which are invalid in a new epoch."""
        self._config = config
        self._handles.clear()
        self._searches.clear()
        self._prefix_handles.clear()

    def follow(self, message: Message) -> EntryId:
        """Process the next message of the log; the entry of requests up to which it covers all."""
        match message:
            case StepResult():
                self._continue(message)
                return START
            case RequestState():
                self._restate(message)
            case ChoiceEnded():
                self.by_id[message.request_id].end(message.choice, message.reason)
            case RequestEnded():
                self._end(message)
            case BeamsEnded():
                self.by_id[message.request_id].end_beams(message.hypotheses)
            case _:
                raise AssertionError(f"{message} in outputs")
        return EntryId.parse(message.requests_cursor)

    def check_recovery(self, recovery: Recovery) -> None:
        """Check that the trimmed log still has every unfinished request."""
        unfinished = {
            client.submit.request_id: {
                number: choice.output
                for number, choice in enumerate(client.choices)
                if not choice.reason
            }
            for client in self._clients
            if client.is_accepted and not client.has_ended and client.search is None
        }
        recovered = {
            found.submit.request_id: {
                number: output.tolist() for number, output in found.outputs().items()
            }
            for found in recovery.in_order()
            if found.search is None
        }
        assert recovered == unfinished
        for found in recovery.in_order():
            asked = self.by_id[found.submit.request_id].submit
            assert found.submit.prompt.tobytes() == asked.prompt.tobytes(), asked.request_id
        searches = {found.submit.request_id: found.search for found in recovery.in_order()}
        for client in self._clients:
            if client.is_accepted and not client.has_ended and client.search is not None:
                search = searches.pop(client.submit.request_id)
                assert search is not None, f"{client.submit.request_id} is recovered without beams"
                assert search.done == client.search.is_over
                client.search.check_state(search.choices(0))
        assert not any(searches.values()), f"{searches} have ended"

    def _continue(self, result: StepResult) -> None:
        ended = dict(zip(result.ended_rows.tolist(), result.ended_flags.tolist(), strict=True))
        sampled = set()
        tokens = result.tokens.tolist()
        for row, handle in enumerate(result.handles.tolist()):
            if handle in self._prefix_handles:
                continue
            client, number = self._handles[handle]
            client.take(number, tokens[row], ended.get(row))
            sampled.add(client.number)
        for number in sampled:
            lengths = {len(choice.output) for choice in self._clients[number - 1].running}
            assert len(lengths) <= 1, f"not all choices of client {number} grew: {lengths}"
        for candidates in result.beams:
            client = self._searches[candidates.group]
            assert client.search is not None, "a state has beams for it"
            if not client.has_ended:
                client.search.advance(candidates)

    def _restate(self, state: RequestState) -> None:
        """Check that a state has exactly the known state, under new handles."""
        client = self.by_id[state.submit.request_id]
        client.is_accepted = True
        assert not client.has_ended, f"{state.submit.request_id} is stated but has ended"
        if client.search is not None:
            client.search.check_state(state.choices)
            [handle] = {beam.handle for beam in state.choices if not beam.finish_reason}
            assert self._searches.setdefault(handle, client) is client, f"{handle} means two"
            return
        assert [known.choice for known in state.choices] == list(range(len(client.choices)))
        for known, choice in zip(state.choices, client.choices, strict=True):
            choice.restate(known.output.tolist(), known.finish_reason)
            if not choice.reason:
                previous = self._handles.setdefault(known.handle, (client, known.choice))
                assert previous == (client, known.choice), f"handle {known.handle} means two"

    def _end(self, ended: RequestEnded) -> None:
        client = self.by_id[ended.request_id]
        if ended.reason == FinishReason.ERROR:
            client.is_refused = True
        assert client.is_refused == may_refuse(self._config, client), ended.error or ended.reason
        client.end_all(ended.reason)
