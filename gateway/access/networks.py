"""Parses the networks of a setting."""

import ipaddress

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


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
