"""A Redis Cluster of real servers on this machine, whose slots can be moved step by step."""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import redis
from redis.crc import key_slot

from deploy.redis.ports import free_port
from deploy.redis.server import find_redis_server

NUM_SLOTS = 16_384
DEADLINE_S = 60.0
_SILENT_MS, _SHORT_MS = 15_000, 500  # after which a node counts as failed


def until(what: Callable[[], object]) -> None:
    """Wait for a condition; commands that fail are tried again."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            if what():
                return
        except redis.RedisError:
            pass
        assert time.monotonic() < deadline, "the servers of the cluster do not get there"
        time.sleep(0.01)  # polling interval of the condition


class Node:
    """One server of a cluster.

    Attributes:
        client: sends it commands, and follows no redirection.
    """

    def __init__(self, folder: Path, stack: ExitStack, *flags: str) -> None:
        self.port, self.bus_port = free_port(), free_port()
        folder.mkdir()
        command = [find_redis_server(), "--bind", "127.0.0.1", "--port", str(self.port)]
        command += ["--cluster-enabled", "yes", "--cluster-port", str(self.bus_port)]
        command += ["--cluster-node-timeout", str(_SILENT_MS), "--dir", str(folder), "--save", ""]
        command += ["--repl-diskless-sync-delay", "0", *flags]
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        stack.callback(self.process.wait)
        stack.callback(self.process.kill)
        self.client = stack.enter_context(redis.Redis(port=self.port))
        until(self.client.ping)
        self.id: str = self.client.execute_command("CLUSTER MYID").decode()

    @property
    def place(self) -> str:
        return f"127.0.0.1:{self.port}"

    def meet(self, other: "Node") -> None:
        self.client.execute_command("CLUSTER MEET", "127.0.0.1", other.port, other.bus_port)

    def sees(self, num_nodes: int, num_primaries: int) -> bool:
        """Whether it has found all nodes, and all slots."""
        found = self.client.execute_command("CLUSTER INFO")
        counts = int(found["cluster_known_nodes"]), int(found["cluster_size"])
        return found["cluster_state"] == "ok" and counts == (num_nodes, num_primaries)

    def set_slot(self, slot: int, *state: str) -> None:
        self.client.execute_command("CLUSTER SETSLOT", slot, *state)


class RedisCluster:
    """Primaries that have as many slots each, and their replicas."""

    def __init__(self, folder: Path, stack: ExitStack, num_primaries: int = 3) -> None:
        self._folder, self._stack = folder, stack
        self.primaries = [Node(folder / f"{n}", stack) for n in range(num_primaries)]
        first, *others = self.primaries
        for index, node in enumerate(self.primaries):
            low, high = (NUM_SLOTS * n // num_primaries for n in (index, index + 1))
            node.client.execute_command("CLUSTER SET-CONFIG-EPOCH", index + 1)
            node.client.execute_command("CLUSTER ADDSLOTSRANGE", low, high - 1)
        for node in others:
            node.meet(first)
        self._until_all_see(self.primaries)

    @property
    def url(self) -> str:
        """URL of a part of the nodes."""
        return f"redis+cluster://127.0.0.1:{free_port()},{self.primaries[-1].place}"

    def add_replica(self, primary: Node) -> Node:
        """Start a server that takes over when a primary has failed, and has all of its data."""
        found = Node(self._folder / f"replica-of-{primary.port}", self._stack)
        found.meet(primary)
        until(lambda: found.sees(len(self.primaries) + 1, len(self.primaries)))
        found.client.execute_command("CLUSTER REPLICATE", primary.id)
        until(lambda: found.client.info("replication")["master_link_status"] == "up")
        return found

    @contextmanager
    def killed(self, primary: Node, replica: Node) -> Iterator[None]:
        """Kill a primary, whose place its replica takes inside the block."""
        self.primaries[self.primaries.index(primary)] = replica
        # Not before: a node that is slow on a busy machine is no failed one.
        self._set_timeout(_SHORT_MS)
        primary.process.kill()
        yield
        self._set_timeout(_SILENT_MS)

    def flush(self) -> None:
        """Delete everything."""
        for node in self.primaries:
            node.client.flushall()

    def owner(self, key: str) -> Node:
        """The primary that has the slot of a key, as it sees it itself."""
        slot = key_slot(key.encode())
        for node in self.primaries:
            for first, last, (_, port, *_), *_ in node.client.execute_command("CLUSTER SLOTS"):
                if first <= slot <= last and port == node.port:
                    return node
        raise AssertionError(f"no node has the slot of {key}")

    def other_than(self, node: Node) -> Node:
        return next(one for one in self.primaries if one is not node)

    @contextmanager
    def moving(self, key: str, to: Node) -> Iterator[Callable[[str], None]]:
        """Move the slot of a key; inside the block, the nodes have a part of its keys each.

        Yields:
            Moves one key of the slot; the others are moved at the end of the block.
        """
        slot, source = key_slot(key.encode()), self.owner(key)
        to.set_slot(slot, "IMPORTING", source.id)
        source.set_slot(slot, "MIGRATING", to.id)

        def migrate(name: str | bytes) -> None:
            source.client.migrate("127.0.0.1", to.port, name, 0, 10_000)

        yield migrate
        while names := source.client.execute_command("CLUSTER GETKEYSINSLOT", slot, 100):
            for name in names:
                migrate(name)
        to.set_slot(slot, "NODE", to.id)
        source.set_slot(slot, "NODE", to.id)

    def move(self, key: str, to: Node) -> None:
        """Move the slot of a key with all its keys."""
        with self.moving(key, to):
            pass

    def _set_timeout(self, silent_ms: int) -> None:
        for node in self.primaries:
            node.client.config_set("cluster-node-timeout", silent_ms)

    def _until_all_see(self, nodes: list[Node]) -> None:
        until(lambda: all(node.sees(len(nodes), len(self.primaries)) for node in nodes))
