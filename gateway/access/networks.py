"""Networks: those of a setting, and the one by which a client is counted."""

import ipaddress

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_SUBSCRIBER_BITS = 64  # prefix of an IPv6 address, which belongs to one subscriber


def networks_of(text: str) -> tuple[Network, ...]:
    """The networks in ``10.0.0.0/8,::1``; none in an empty text or ``none``.

    Raises:
        ValueError: a part is no network.
    """
    if text.strip() in ("", "none"):
        return ()
    try:
        return tuple(ipaddress.ip_network(part.strip()) for part in text.split(","))
    except ValueError as error:
        reason = "expected addresses or networks such as 10.0.0.0/8,::1, or none"
        raise ValueError(f"{reason}: {error}") from None


def address_of(text: str) -> Address | None:
    """The address in a text, as IPv4 if it is mapped to IPv6; None if there is none."""
    try:
        found = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        return found.ipv4_mapped
    return found


def subscriber_of(address: Address) -> str:
    """The IPv4 address, or the IPv6 network, that belongs to one subscriber."""
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((address, _SUBSCRIBER_BITS), strict=False))
    return str(address)
