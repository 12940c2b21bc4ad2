"""Which connections make room for new ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.access.networks import networks_of
from gateway.http.connection_table import ConnectionTable


class Held:
    """A connection."""

    def __init__(self) -> None:
        self.is_closed = False

    def evict(self) -> None:
        self.is_closed = True


def table(total: int = 4, per_address: int = 100, trusted: str = "none") -> ConnectionTable:
    return ConnectionTable(total, per_address, networks_of(trusted))


def add(to: ConnectionTable, address: str | None, number: int = 1) -> list[Held]:
    """New connections, which there is room for."""
    added = [Held() for _ in range(number)]
    assert [to.add(connection, address) for connection in added] == [None] * number
    return added


def test_the_connection_that_has_been_idle_longest_makes_room() -> None:
    full = table(4)
    first, second, third, fourth = add(full, "10.0.0.1", 4)
    full.set_busy(first)
    full.set_busy(second)
    full.set_idle(second)  # it is idle since after the third
    add(full, "10.0.0.2")
    assert [c.is_closed for c in (first, second, third, fourth)] == [False, False, True, False]
    add(full, "10.0.0.2", 2)
    assert [c.is_closed for c in (first, second, fourth)] == [False, True, True]
    assert len(full) == 4


def test_where_no_connection_is_idle_new_ones_are_refused() -> None:
    full = table(2)
    for connection in add(full, "10.0.0.1", 2):
        full.set_busy(connection)
    error = full.add(Held(), "10.0.0.2")
    assert error is not None
    assert (error.status, error.code) == (503, "too_many_connections")
    assert len(full) == 2


def test_an_address_with_too_many_loses_its_own() -> None:
    shared = table(100, per_address=3)
    other, *_ = add(shared, "10.0.0.2", 3)
    first, second, third = add(shared, "10.0.0.1", 3)
    shared.set_busy(first)
    [fourth] = add(shared, "10.0.0.1")
    assert [c.is_closed for c in (other, first, second, third)] == [False, False, True, False]
    for connection in (third, fourth):
        shared.set_busy(connection)
    error = shared.add(Held(), "10.0.0.1")
    assert error is not None
    assert (error.status, error.code) == (429, "too_many_connections")
    assert "3 connections from this address" in str(error)
    assert int(error.headers["Retry-After"]) > 0
    shared.remove(first)
    add(shared, "10.0.0.1")


@pytest.mark.parametrize(
    ("addresses", "count_together"),
    [
        (["2001:db8::1", "2001:db8::2:0:0:1"], True),
        (["2001:db8::1", "2001:db8:0:1::1"], False),
        (["10.0.0.1", "10.0.0.2"], False),
        (["10.0.0.1", "::ffff:10.0.0.1"], True),
        (["fe80::1%eth0", "fe80::2%eth1"], True),
    ],
)
def test_ipv6_addresses_are_counted_by_subscriber(
    addresses: list[str], count_together: bool
) -> None:
    shared = table(100, per_address=1)
    first, second = Held(), Held()
    assert shared.add(first, addresses[0]) is None
    assert shared.add(second, addresses[1]) is None
    assert first.is_closed == count_together


@pytest.mark.parametrize("address", ["127.0.0.5", "::1", "10.9.8.7", None, ""])
def test_connections_of_trusted_proxies_are_not_counted_by_address(address: str | None) -> None:
    shared = table(100, per_address=1, trusted="127.0.0.0/8, ::1,10.9.0.0/16")
    assert not any(connection.is_closed for connection in add(shared, address, 5))


@pytest.mark.parametrize("text", ["10.0.0.0/33", "localhost", "10.0.0.1/8", "::1;::2", ","])
def test_what_is_no_network_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="addresses or networks"):
        networks_of(text)


@given(st.lists(st.tuples(st.sampled_from("aibr"), st.integers(0, 9), st.integers(0, 2))))
def test_counts_are_correct_after_random_steps(steps: list[tuple[str, int, int]]) -> None:
    shared = table(5, per_address=3)
    open_now: list[tuple[Held, str]] = []
    for what, which, host in steps:
        address = f"10.0.0.{host}"
        if what == "a":
            new = Held()
            if shared.add(new, address) is None:
                open_now.append((new, address))
            open_now = [(held, at) for held, at in open_now if not held.is_closed]
        elif open_now:
            held, _ = open_now[which % len(open_now)]
            if what == "r":
                shared.remove(held)
                open_now = [item for item in open_now if item[0] is not held]
            else:
                (shared.set_idle if what == "i" else shared.set_busy)(held)
        assert len(shared) == len(open_now) <= 5
        for number in range(3):
            assert sum(at == f"10.0.0.{number}" for _, at in open_now) <= 3
    for held, _ in open_now:
        shared.remove(held)
    assert len(shared) == 0
    assert not shared._num_of
    assert not shared._idle
    assert not shared._idle_of
