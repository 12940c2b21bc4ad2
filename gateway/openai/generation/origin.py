"""Where a request for a generation comes from."""

from dataclasses import dataclass

from starlette.types import Receive

from gateway.http.call import Call


@dataclass(frozen=True, slots=True)
class Origin:
    """An HTTP call, or a job of this gateway.

    Attributes:
        call: with its line in the access log; its id becomes the generation's.
        caller: by which threads are shared.
        client: its name, by which the generations that ``key`` names are kept apart.
        key: names the generation, so that it can be asked for again; None: it has no name.
        priority: a lower value is served first.
        receive: of the connection: tells when the client leaves.
    """

    call: Call
    caller: str
    client: str
    key: str | None
    priority: int
    receive: Receive
