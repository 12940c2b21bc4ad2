"""Sums through shared memory between processes that are killed and paused."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from gpu_worker.ranks.collectives import TorchCollectives
from gpu_worker.ranks.member import GroupOver, Member
from gpu_worker.ranks.shared_memory import SharedCollectives, share_memory
from tests.gpu_worker.ranks.rank_threads import RankThreads

_HOST = "127.0.0.1"
_CPU = torch.device("cpu")
_GROUPS = ("paused", "killed")
_PEER = textwrap.dedent(
    """
    import sys
    from torch._C._distributed_c10d import TCPStore
    from tests.gpu_worker.ranks.test_shared_memory import joined
    import torch

    store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, wait_for_workers=False)
    groups = joined(store, 1)
    for group in groups:
        x = torch.arange(100, dtype=torch.float32)
        group.sum(x)
        print(x.sum().item(), flush=True)
    sys.stdin.read()
    """
)


def joined(store: TCPStore, rank: int) -> list[SharedCollectives]:
    """This process as a rank of each of the groups."""
    found = []
    for name in _GROUPS:
        shared = share_memory(TorchCollectives(Member(rank, 2, name), store, _HOST, _CPU))
        assert isinstance(shared, SharedCollectives)
        found.append(shared)
    return found


@contextmanager
def peer(store: TCPStore) -> Iterator[subprocess.Popen[str]]:
    """A process that is rank 1 of each group, adds one tensor there, and waits."""
    command = [sys.executable, "-c", _PEER, str(store.port)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_rank_that_is_paused_or_killed_ends_the_sums_of_the_others() -> None:
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    with peer(store) as other:
        paused, killed = joined(store, 0)
        mapped = Path("/proc/self/maps").read_text().splitlines()
        files = [line.split(maxsplit=5)[5] for line in mapped if "/pagestream-" in line]
        assert files
        assert all(file.endswith("(deleted)") for file in files), "nothing is left behind"
        x = torch.empty(0)
        for group in (paused, killed):
            x = torch.ones(100)
            group.sum(x)
            assert x.tolist() == [1.0 + n for n in range(100)]
            assert other.stdout is not None
            assert float(other.stdout.readline()) == x.sum().item()
        assert (paused.totals.count, paused.totals.num_bytes) == (1, 400)

        os.kill(other.pid, signal.SIGSTOP)
        paused.set_deadline(0.05)
        with pytest.raises(GroupOver, match=r"rank 1 is more than 0\.05 s late"):
            paused.gather([1])
        paused.set_deadline(1e6)
        out = torch.full((100,), torch.nan)
        paused.add(x, out)
        assert out.isnan().all(), "after a failure sums return at once"

        other.kill()
        killed.set_deadline(1e6)
        with pytest.raises(GroupOver, match=r"rank 0 of group killed: .*: rank 1 is gone"):
            killed.sum(x)


def test_without_room_in_shared_memory_sums_go_through_gloo(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("gpu_worker.ranks.shared_memory._FOLDER", tmp_path / "missing")
    pair = RankThreads(2)
    ranks = pair.connect()
    assert isinstance(ranks[0].collectives, TorchCollectives)
    totals = pair.run(lambda rank: ranks[rank].reducer.sum(torch.ones(3), torch.float32).tolist())
    assert totals == [[2.0] * 3] * 2
    pair.close()
