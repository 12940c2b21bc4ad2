"""The name of a call's caller, by which threads are shared."""

import pytest
from starlette.requests import Request

from gateway.http.call import Call, caller_of


def caller(address: str | None, tenant: str = "") -> str:
    client = None if address is None else (address, 5)
    scope = {
        "type": "http",
        "headers": [],
        "client": client,
        "pagestream.call": Call(tenant=tenant),
    }
    return caller_of(Request(scope))


@pytest.mark.parametrize(
    ("one", "other", "are_same"),
    [
        ("2001:db8::1", "2001:db8::2:0:0:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("10.0.0.1", "10.0.0.2", False),
        ("10.0.0.1", "::ffff:10.0.0.1", True),
        ("testclient", "10.0.0.1", False),
    ],
)
def test_all_addresses_of_one_ipv6_subscriber_are_one_caller(
    one: str, other: str, are_same: bool
) -> None:
    assert (caller(one) == caller(other)) == are_same


def test_an_api_key_is_the_caller_from_whatever_address() -> None:
    assert caller("10.0.0.1", "alice") == caller(None, "alice") == "alice"
    assert caller(None) == ""
