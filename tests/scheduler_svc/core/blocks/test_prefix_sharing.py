"""No tenant finds the blocks of another in the prefix cache, with any salt."""

from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.blocks.prefix_hashes import shared_root, tenant_root
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from tests.scheduler_svc.core.blocks.test_pinned_prefixes import BLOCK_SIZE, Engine, flood
from tests.support.requests import pin, submit

PREFIX = range(100, 116)  # four blocks


def engine(tenants_share: bool = False) -> Engine:
    found = Engine()
    found.core = Scheduler(
        SchedulerConfig(
            *(40, BLOCK_SIZE, 128, 8, 24, 2, 0, 1_000),
            max_pinned_blocks=10,
            tenants_share_prefixes=tenants_share,
        )
    )
    return found


def test_a_tenant_finds_its_own_prompts_and_no_other_tenants() -> None:
    found = engine()
    for name, tenant in (("first", "alice"), ("theirs", "bob"), ("again", "alice")):
        found.run(submit(name, [*PREFIX, 7, 8], max_tokens=5, tenant=tenant))
    assert found.cached == {"first": 0, "theirs": 0, "again": len(PREFIX)}


def test_the_operator_may_let_all_tenants_share() -> None:
    found = engine(tenants_share=True)
    for name, tenant in (("first", "alice"), ("theirs", "bob")):
        found.run(submit(name, [*PREFIX, 7, 8], max_tokens=5, tenant=tenant))
    assert found.cached == {"first": 0, "theirs": len(PREFIX)}


def test_all_tenants_find_a_pinned_prefix_and_only_that() -> None:
    found = engine()
    found.run(pin("a", PREFIX))
    for name, tenant in (("first", "alice"), ("theirs", "bob"), ("again", "alice")):
        found.run(submit(name, [*PREFIX, *range(8)], max_tokens=5, tenant=tenant))
    assert found.cached == {
        "first": len(PREFIX),
        "theirs": len(PREFIX),
        "again": len(PREFIX) + BLOCK_SIZE,  # of eight tokens; one is left to compute
    }


def test_a_prompt_that_leaves_a_pinned_prefix_finds_what_they_have_in_common() -> None:
    found = engine()
    found.run(pin("a", PREFIX))
    found.run(submit("leaves", [*PREFIX[:9], *range(20)], max_tokens=5, tenant="alice"))
    assert found.cached == {"leaves": 2 * BLOCK_SIZE}


def test_pinned_content_is_computed_once_for_all_tenants() -> None:
    found = engine()
    found.give(*flood(8), pin("a", PREFIX))  # which waits behind all requests
    found.run(submit("first", [*PREFIX, 7, 8], max_tokens=5, tenant="alice"))
    found.run(submit("theirs", [*PREFIX, 7, 8], max_tokens=5, tenant="bob"))
    assert (found.cached["first"], found.cached["theirs"]) == (0, len(PREFIX))


def test_a_prefix_that_is_pinned_while_a_request_waits_is_shared_by_it() -> None:
    found = engine()
    found.give(submit("large", range(1_000, 1_060), max_tokens=20))
    for _ in range(8):
        found.turn()
    prefix = range(200, 216)
    found.give(submit("waits", [*prefix, *range(300, 390)], max_tokens=5, tenant="alice"))
    found.turn()  # it is looked at, and does not fit
    assert "waits" not in found.cached
    # The request that computes the prefix waits behind those of clients.
    found.give(pin("a", prefix), submit("theirs", [*prefix, 7], max_tokens=5, tenant="bob"))
    found.run()
    assert (found.cached["waits"], found.cached["theirs"]) == (0, len(prefix))


def test_a_salt_that_spells_out_another_chains_block_does_not_continue_it() -> None:
    """Of a hash without domains, the name of a block is also the root of a crafted salt."""

    def plain(data: bytes) -> bytes:
        return blake2b(data, digest_size=16).digest()

    salts = (str(number) for number in range(1_000_000))
    salt = next(found for found in salts if _is_text(plain(found.encode())))
    first = np.array(PREFIX[:BLOCK_SIZE], np.int32)
    crafted = (plain(salt.encode()) + first.tobytes()).decode()
    for tenants_share in (False, True):
        found = engine(tenants_share)
        found.run(submit("victim", [*PREFIX, 7], max_tokens=1, cache_salt=salt))
        rest = [*PREFIX[BLOCK_SIZE:], 7]
        found.run(submit("attacker", rest, max_tokens=1, cache_salt=crafted))
        assert found.cached == {"victim": 0, "attacker": 0}


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_fields_of_a_root_do_not_run_into_each_other() -> None:
    roots = {
        shared_root("ab"),
        tenant_root("", "ab"),
        tenant_root("a", "b"),
        tenant_root("ab", ""),
        tenant_root("a", "", b"b"),
        tenant_root("tenant", "ab"),
        shared_root("tenantab"),
    }
    assert len(roots) == 7
    assert tenant_root("\ud800", "") != tenant_root("?", "")  # JSON may hold half a character


@pytest.mark.parametrize("has_pin", [False, True])
@given(
    requests=st.lists(
        st.tuples(
            st.sampled_from(["alice", "bob"]),
            st.sampled_from(["", "s"]),
            st.integers(0, 1),
            st.integers(0, 24),
            st.integers(1, 12),
        ),
        max_size=12,
    )
)
@settings(max_examples=60, deadline=None)
def test_cached_tokens_depend_on_the_tenants_own_requests_and_pins_alone(
    has_pin: bool, requests: list[tuple[str, str, int, int, int]]
) -> None:
    """Alice's requests find the same whether Bob was there or not, in a pool that never evicts."""
    found_by = []
    for with_bob in (True, False):
        found = Engine(num_blocks=2_000, max_pinned=10)
        found.core = Scheduler(
            SchedulerConfig(
                *(2_000, BLOCK_SIZE, 128, 8, 24, 2, 0, 1_000),
                max_pinned_blocks=10,
                tenants_share_prefixes=False,
            )
        )
        if has_pin:
            found.run(pin("a", range(12)))
        for number, (tenant, salt, family, num_shared, num_own) in enumerate(requests):
            if tenant == "alice" or with_bob:
                name, first = f"{tenant}{number}", family * 50
                prompt = [*range(first, first + num_shared), *range(90, 90 + num_own)]
                found.run(submit(name, prompt, tenant=tenant, cache_salt=salt, max_tokens=6))
        found_by.append(
            {name: count for name, count in found.cached.items() if name.startswith("alice")}
        )
    assert found_by[0] == found_by[1]
