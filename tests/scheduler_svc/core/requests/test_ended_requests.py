"""What has ended is remembered for all tenants, however much one of them sends."""

from collections.abc import Iterator

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.requests.ended_requests import EndedChoice, EndedRequest, RememberedRequests
from scheduler_svc.recovery import Recovery
from shared.messages.endings import FinishReason
from shared.messages.outputs import ChoiceState, RequestEnded, RequestState
from tests.support.requests import submit

LEAST = 400  # that a request counts as


def ended(name: str, tenant: str, num_tokens: int) -> EndedRequest:
    request = submit(name, np.zeros(num_tokens, np.int32).tolist(), tenant=tenant)
    return EndedRequest(request, {0: EndedChoice(np.empty(0, np.int32), "stop")}, None)


def test_forty_long_prompts_of_one_key_cost_no_other_key_its_resumptions() -> None:
    found = RememberedRequests(60_000)
    others = [f"bob-{number}" for number in range(100)]
    for name in others:
        found.add(name, ended(name, "bob", 50), now_ms=0)
    for number in range(80):
        found.add(f"alice-{number}", ended(f"alice-{number}", "alice", 100_000), now_ms=0)
    assert all(found.find(name) is not None for name in others)
    kept = [number for number in range(80) if found.find(f"alice-{number}") is not None]
    assert kept == list(range(80 - len(kept), 80))  # of its own, the latest
    assert len(kept) >= 39


def test_many_small_requests_of_one_key_cost_no_other_key_its_resumptions() -> None:
    found = RememberedRequests(60_000)
    found.add("bob", ended("bob", "bob", 90_000), now_ms=0)
    for number in range(20_000):
        found.add(f"alice-{number}", ended(f"alice-{number}", "alice", 1), now_ms=0)
    assert found.find("bob") is not None
    assert 9_000 < len(found) <= 10_000


def test_what_ended_before_a_new_epoch_is_shared_in_the_same_way() -> None:
    recovery = Recovery(max_model_len=200_000)
    for name, tenant, num_tokens in _endings():
        request = submit(name, [1] * num_tokens, tenant=tenant)
        over = ChoiceState(0, 0, np.array([5], np.int32), "stop")
        recovery.apply(RequestState(request, (over,), "0-0"))
    assert recovery.finished.find("bob") is not None
    assert recovery.finished.find("alice-0") is None


def _endings() -> Iterator[tuple[str, str, int]]:
    yield "bob", "bob", 10
    for number in range(45):
        yield f"alice-{number}", "alice", 100_000


def test_a_request_that_failed_is_remembered_without_its_prompt() -> None:
    found = RememberedRequests(60_000, max_tokens=10 * LEAST)
    for number in range(10):
        name = f"r{number}"
        over = RequestEnded(name, FinishReason.ABORT, "", "0-0")
        request = submit(name, [1] * 5_000, tenant="alice")
        found.add(name, EndedRequest(request, {}, over), now_ms=0)
    assert len(found) == 10
    known = found.find("r0")
    assert known is not None
    assert known.submit is not None
    assert (len(known.submit.prompt), known.attachment) == (0, "attachment")


@given(
    events=st.lists(
        st.tuples(st.integers(0, 4), st.integers(1, 3_000), st.integers(0, 30)), max_size=120
    )
)
@settings(max_examples=60, deadline=None)
def test_no_tenant_loses_anything_while_another_has_more(
    events: list[tuple[int, int, int]],
) -> None:
    most = 10_000
    found = RememberedRequests(window_ms=50, max_tokens=most)
    now_ms = 0
    for number, (tenant, num_tokens, passed_ms) in enumerate(events):
        now_ms += passed_ms
        found.expire(now_ms)
        before = _shares(found)
        found.add(f"r{number}", ended(f"r{number}", str(tenant), num_tokens), now_ms)
        size = max(num_tokens, LEAST)
        wanted = {**before, str(tenant): before.get(str(tenant), 0) + size}
        after = _shares(found)
        assert sum(after.values()) <= most
        for name, share in wanted.items():
            if after.get(name, 0) < share:
                # Before its last loss it had as much as any: no other has more by then.
                largest_loss = max(3_000, LEAST)
                assert max(after.values(), default=0) <= after.get(name, 0) + largest_loss
        if sum(wanted.values()) <= most:
            assert after == wanted


def _shares(found: RememberedRequests) -> dict[str, int]:
    shares: dict[str, int] = {}
    for _, one in found.items():
        assert one.submit is not None
        shares[one.tenant] = shares.get(one.tenant, 0) + max(len(one.submit.prompt), LEAST)
    return shares
