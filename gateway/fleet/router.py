"""Routes requests to engines: keeps what the choice depends on, and reports each choice."""

from collections.abc import Sequence

from gateway.fleet.members import Member
from gateway.fleet.prefix_index import PrefixIndex, prefixes_of
from gateway.fleet.routing import Choice, EngineLoad, Reason, choose, mean_load
from gateway.fleet.shared_routes import SharedRoutes
from shared.logs import EventLog
from shared.messages.requests import Submit
from shared.messages.routes import Routed, unpack_hashes
from shared.metrics import ModelMetrics

_log = EventLog("gateway.fleet")


class Router:
    """Chooses engines by their load and by the prefixes that were sent to them.

    Args:
        shared: the choices of other gateways; this one's are added.
    """

    def __init__(self, metrics: ModelMetrics, shared: SharedRoutes) -> None:
        self._metrics = metrics
        self._shared = shared
        self._index = PrefixIndex()
        self._loads: dict[str, EngineLoad] = {}
        self._mean = 1.0
        self._routes: dict[str, Choice] = {}  # of open requests

    def update(self, ready: Sequence[Member]) -> None:
        """Take the loads of the engines' last leases."""
        self._loads = {member.engine_id: member.load for member in ready}
        self._mean = mean_load(self._loads.values())
        self._shared.start(self._routed_elsewhere)

    async def end(self) -> None:
        """Stop sharing choices."""
        await self._shared.end()

    def route(
        self, submit: Submit, ready: Sequence[Member], reason: Reason | None = None
    ) -> Member | None:
        """Choose the engine of a request; None if none can take it.

        Args:
            reason: to report instead of that of the choice.
        """
        fits = [member for member in ready if _fits(member, submit)] or ready
        if not fits:
            return None
        prompt = prefixes_of(submit.prompt, submit.tenant, submit.cache_salt)
        by_name = {member.engine_id: member.load for member in fits}
        loads = list(by_name.values())
        expected = self._index.expected(prompt)
        num_tokens = max(1, prompt.num_tokens)
        found = choose(submit.request_id, num_tokens, expected, loads, self._mean, by_name)
        if reason is not None:
            found = Choice(found.engine, reason, found.expected_tokens)
        member = next(member for member in fits if member.engine_id == found.engine)
        num_new_tokens = prompt.num_tokens - found.expected_tokens
        member.load.send(num_new_tokens)
        self._index.sent(prompt.hashes, found.engine)
        self._shared.send(found.engine, prompt.hashes, num_new_tokens)
        self._routes[submit.request_id] = found
        self._metrics.routed_requests.inc(1, found.engine, found.reason)
        _log.info(
            "routed",
            request=submit.request_id,
            engine=found.engine,
            reason=found.reason,
            expected_tokens=found.expected_tokens,
        )
        return member

    def _routed_elsewhere(self, routed: Routed) -> None:
        """Take the choice of another gateway."""
        self._index.sent(unpack_hashes(routed.prefixes), routed.engine)
        if (load := self._loads.get(routed.engine)) is not None:
            load.send(routed.num_new_tokens)

    def route_of(self, request_id: str) -> str:
        """The choice for an open request, for a header; empty if none was made."""
        route = self._routes.get(request_id)
        if route is None:
            return ""
        return f"{route.engine}; reason={route.reason}; expected_tokens={route.expected_tokens}"

    def forget(self, request_id: str) -> None:
        """Forget the choice for a request that is open no more."""
        self._routes.pop(request_id, None)


def _fits(member: Member, submit: Submit) -> bool:
    """Whether an engine's pool and context have room for a request."""
    engine = member.engine
    assert engine is not None, f"{member.engine_id} is not ready"
    num_prompt = len(submit.prompt)
    max_tokens = min(submit.sampling.max_tokens, engine.model.max_model_len - num_prompt)
    if max_tokens < 1 or submit.num_choices > engine.max_num_sequences:
        return False
    needed = engine.blocks_needed(num_prompt, max_tokens, submit.num_choices)
    return needed <= engine.kv.num_blocks
