"""The store in which the ranks of a group meet: torch's, at an address that rank 0 announces."""

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from gpu_worker.ranks.member import GroupOver, Member

_TIMEOUT = timedelta(seconds=5)


class TcpRendezvous:
    """Opens or joins a store.

    Args:
        member: rank and number of ranks.
        host: address at which the other ranks reach this one.

    Attributes:
        store: of the group that was opened or joined last.
    """

    def __init__(self, member: Member, host: str) -> None:
        self._member = member
        self._host = host
        self.store: TCPStore | None = None

    def open(self, group: str) -> tuple[str, "_Entry"]:
        """Open a store on a free port and join as rank 0: its address, HOST:PORT, and the entry."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind((self._host, 0))
            listener.listen()
            port = listener.getsockname()[1]
            descriptor = listener.detach()  # the store closes it
        self.store = TCPStore(
            self._host,
            port,
            self._member.num_ranks,
            is_master=True,
            timeout=_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )
        return f"{self._host}:{port}", self._enter(self.store, group)

    def join(self, group: str, address: str) -> "_Entry":
        """Join as another rank.

        Raises:
            GroupOver: the store cannot be reached, or has this rank already.
        """
        host, _, port = address.rpartition(":")
        try:
            self.store = TCPStore(
                host,
                int(port),
                self._member.num_ranks,
                is_master=False,
                timeout=_TIMEOUT,
                wait_for_workers=False,
            )
            return self._enter(self.store, group)
        except (RuntimeError, ValueError) as error:
            why = str(error).partition("\n")[0]
            raise GroupOver(f"the store of group {group} at {address}: {why}") from error

    def _enter(self, store: TCPStore, group: str) -> "_Entry":
        member = self._member
        if store.add(f"{group}/{member.rank}", 1) > 1:
            raise GroupOver(f"group {group} has rank {member.rank} already")
        return _Entry(store, [f"{group}/{rank}" for rank in range(member.num_ranks)])


class _Entry:
    """A rank's entry in a store."""

    def __init__(self, store: TCPStore, keys: list[str]) -> None:
        self._store = store
        self._keys = keys

    def is_complete(self) -> bool:
        """Whether all ranks have joined.

        Raises:
            GroupOver: the store is gone.
        """
        try:
            return bool(self._store.check(self._keys))
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
            raise GroupOver(f"the group's store: {why}") from error
