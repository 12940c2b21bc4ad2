"""Executes commands at the nodes of a Redis Cluster that have their keys.

redis-py's client for clusters repeats commands after lost connections, but an append whose reply
was lost must not be sent again. Here a command is repeated only after a node has refused it, and so
has not executed it: MOVED and ASK name another node, TRYAGAIN comes while keys are migrated.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from random import sample
from typing import Any

from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterDownError,
    MovedError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from shared.bus.connections import Command
from shared.bus.pools import ClusterUrl
from shared.bus.servers import OneServer
from shared.bus.slot_map import Address, SlotMap

_ASKING = ("ASKING",)
_SLOTS = ("CLUSTER", "SLOTS")
_SLOTS_TIMEOUT_S = 1.0  # of each node; another one is asked after that
_REFRESH_S = 5.0  # no more nodes are asked after that
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.2


class NotACluster(RedisError):
    """The server is no node of a Redis Cluster."""


class Cluster:
    """Implements Servers for a Redis Cluster.

    The map of slots is read from any node, and again when a node has redirected a command or did
    not answer, or when the cluster is down.

    Args:
        url: of some of its nodes.
    """

    def __init__(self, url: ClusterUrl) -> None:
        self._url = url
        self._seeds = [Address(*place) for place in url.places]
        self._servers: dict[Address, OneServer] = {}
        self._slots = SlotMap()
        self._is_stale = True
        self._failed: Address | None = None  # the node that did not answer last
        self._refreshing = asyncio.Lock()

    async def execute(self, *commands: Command, key: str, timeout_s: float) -> list[Any]:
        return await self._execute(key_slot(key.encode()), commands, timeout_s)

    async def execute_each(
        self, commands: Sequence[tuple[str, Command]], timeout_s: float
    ) -> list[Any]:
        by_node: dict[Address, list[int]] = {}
        for index, (key, _) in enumerate(commands):
            by_node.setdefault(await self._owner(key_slot(key.encode())), []).append(index)
        replies: list[Any] = [None] * len(commands)
        for node, indices in by_node.items():
            found = await self._execute_at(node, [commands[i][1] for i in indices], timeout_s)
            for index, reply in zip(indices, found, strict=True):
                replies[index] = reply
        for index, (key, command) in enumerate(commands):
            if _refusal(replies[index : index + 1]) is not None:
                [replies[index]] = await self.execute(command, key=key, timeout_s=timeout_s)
        return replies

    async def execute_beside(self, key: str, command: Command, timeout_s: float) -> Any:
        # Only a command with the key is redirected. While keys are migrated, the old node still is
        # the slot's owner, whether it has the key or not.
        commands = (("EXISTS", key), command)
        owned, reply = await self._execute(key_slot(key.encode()), commands, timeout_s, False)
        is_owner = not isinstance(owned, ResponseError) or _is_of_migration(owned)
        return reply if is_owner else owned

    async def execute_on_all(self, command: Command, timeout_s: float) -> Mapping[str, Any]:
        if self._is_stale:
            await self._refresh()
        replies = {}
        for node in self._slots.primaries:
            [replies[str(node)]] = await self._execute_at(node, [command], timeout_s)
        return replies

    def are_together(self, keys: Sequence[str]) -> bool:
        return len({key_slot(key.encode()) for key in keys}) <= 1

    async def close(self) -> None:
        for server in list(self._servers.values()):
            await server.close()

    async def _execute(
        self,
        slot: int,
        commands: Sequence[Command],
        timeout_s: float,
        follows_keys: bool = True,
    ) -> list[Any]:
        """Execute commands at the node that has their keys.

        Args:
            follows_keys: to the next node of a slot that is about to get another one.
        """
        loop = asyncio.get_running_loop()
        until_s, pause_s = loop.time() + timeout_s, 0.0
        node, is_asking = await self._owner(slot), False
        while True:
            replies = await self._execute_at(node, commands, timeout_s, is_asking)
            refusal = _refusal(replies)
            if refusal is None or (not follows_keys and _is_of_migration(refusal)):
                return replies
            if loop.time() >= until_s:
                why = f"no node has served it for {timeout_s:g} s: {refusal}"
                raise RedisError(f"slot {slot} is about to move: {why}")
            if pause_s or isinstance(refusal, TryAgainError):
                await asyncio.sleep(max(pause_s, _FIRST_PAUSE_S))
            pause_s = min(max(2 * pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
            is_asking = False
            if isinstance(refusal, TryAgainError):
                node = await self._owner(slot)
                continue
            node = Address(refusal.host or node.host, refusal.port)
            if isinstance(refusal, MovedError):
                await self._refresh(node)
                if self._slots.owner(slot) != node:
                    self._slots.move(slot, node)
            else:
                is_asking = True

    async def _execute_at(
        self, node: Address, commands: Sequence[Command], timeout_s: float, is_asking: bool = False
    ) -> list[Any]:
        """Execute commands at one node.

        Args:
            is_asking: at a node that is about to take the slot over. ASKING holds for one command
                or one transaction.
        """
        server = self._server(node)
        try:
            if not is_asking:
                replies = await server.execute(*commands, timeout_s=timeout_s)
            else:
                replies = (await server.execute(_ASKING, *commands, timeout_s=timeout_s))[1:]
        except (RedisError, OSError):
            self._is_stale, self._failed = True, node
            raise
        if any(isinstance(reply, ClusterDownError) for reply in replies):
            self._is_stale = True
        return replies

    def _server(self, node: Address) -> OneServer:
        found = self._servers.get(node)
        if found is None:
            found = self._servers[node] = OneServer(self._url.at(*node))
        return found

    # ------------------------------------------------------------------- slots

    async def _owner(self, slot: int) -> Address:
        if self._is_stale:
            await self._refresh()
        owner = self._slots.owner(slot)
        if owner is None:
            self._is_stale = True
            raise RedisError(f"no node of the Redis Cluster has slot {slot}")
        return owner

    async def _refresh(self, first: Address | None = None) -> None:
        """Read the map of slots from the first node that answers.

        Args:
            first: the node to be asked first; None: any.

        Raises:
            RedisError: no node answers.
        """
        before = self._slots
        async with self._refreshing:
            if self._slots is not before:
                return  # another call has done it
            until_s = asyncio.get_running_loop().time() + _REFRESH_S
            errors = {}
            for node in self._candidates(first):
                try:
                    [reply] = await self._server(node).execute(_SLOTS, timeout_s=_SLOTS_TIMEOUT_S)
                    if isinstance(reply, ResponseError):
                        raise _slots_error(reply)
                except (AuthenticationError, NotACluster):
                    raise
                except (RedisError, OSError) as error:
                    errors[node] = error
                else:
                    self._slots, self._is_stale = SlotMap.parse(reply, node), False
                    await self._close_others()
                    return
                if asyncio.get_running_loop().time() >= until_s:
                    break
            why = "; ".join(f"{node}: {error}" for node, error in errors.items())
            raise RedisError(f"no node of the Redis Cluster answers: {why}")

    def _candidates(self, first: Address | None) -> Iterable[Address]:
        """Nodes to read the map from, the one that failed last behind all others."""
        known = sample(self._slots.nodes, len(self._slots.nodes))
        found = dict.fromkeys([*([first] if first else []), *known, *self._seeds])
        if self._failed in found:
            del found[self._failed]
            found[self._failed] = None
        return found

    async def _close_others(self) -> None:
        """Close the idle connections to nodes that have no slots any more."""
        for node, server in list(self._servers.items()):
            if node not in self._slots.primaries:
                await server.close()


def _refusal(replies: Sequence[Any]) -> AskError | TryAgainError | None:
    """Why a command or a transaction was refused, if another attempt may succeed.

    Of a transaction either all commands are executed or none: a node that refuses one of them
    refuses EXEC as well.
    """
    for reply in replies:
        if isinstance(reply, (AskError, TryAgainError)):  # MOVED is an AskError as well
            return reply
    return None


def _is_of_migration(error: ResponseError) -> bool:
    """Whether the node that replied is the owner of a slot whose keys are migrated."""
    return isinstance(error, (AskError, TryAgainError)) and not isinstance(error, MovedError)


def _slots_error(reply: ResponseError) -> RedisError:
    return NotACluster(str(reply)) if "cluster support disabled" in str(reply) else reply
