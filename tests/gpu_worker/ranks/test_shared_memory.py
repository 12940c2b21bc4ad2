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
_PEER = textwrap.dedent(
    """
    import sys, torch
    from torch._C._distributed_c10d import TCPStore
    from gpu_worker.ranks.collectives import TorchCollectives
    from gpu_worker.ranks.member import Member
    from gpu_worker.ranks.shared_memory import SharedCollectives, share_memory

    store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, wait_for_workers=False)
    member = Member(1, 2, "group")
    shared = share_memory(TorchCollectives(member, store, "127.0.0.1", torch.device("cpu")))
    assert isinstance(shared, SharedCollectives)
    x = torch.arange(100, dtype=torch.float32)
    shared.sum(x)
    print(x.sum().item(), flush=True)
    sys.stdin.read()
    """
)


@contextmanager
def peer(store: TCPStore) -> Iterator[subprocess.Popen[str]]:
    """A process that is rank 1, adds one tensor, and waits."""
    command = [sys.executable, "-c", _PEER, str(store.port)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_rank_that_is_paused_or_killed_ends_a_sum_that_is_captured_too() -> None:
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    with peer(store) as other:
        collectives = TorchCollectives(Member(0, 2, "group"), store, _HOST, torch.device("cpu"))
        shared = share_memory(collectives)
        assert isinstance(shared, SharedCollectives)
        assert not list(Path("/dev/shm").glob("pagestream-*")), "nothing is left behind"
        x = torch.ones(100)
        shared.sum(x)
        assert x.tolist() == [1.0 + n for n in range(100)]
        assert other.stdout is not None
        assert float(other.stdout.readline()) == x.sum().item()
        assert (shared.totals.count, shared.totals.num_bytes) == (1, 400)
        os.kill(other.pid, signal.SIGSTOP)
        shared.set_deadline(0.05)
        with pytest.raises(GroupOver, match=r"rank 1 is more than 0\.05 s late"):
            shared.gather([1])
    other.wait()
    shared.set_deadline(1e6)
    out = torch.full((100,), torch.nan)
    shared.add(x, out)
    assert out.isnan().all(), "after a failure sums return at once"


def test_a_rank_that_is_killed_ends_the_wait_of_the_others() -> None:
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    with peer(store) as other:
        collectives = TorchCollectives(Member(0, 2, "group"), store, _HOST, torch.device("cpu"))
        shared = share_memory(collectives)
        shared.sum(torch.ones(100))
        other.kill()
        shared.set_deadline(1e6)
        with pytest.raises(GroupOver, match=r"rank 0 of group group: .*: rank 1 is gone"):
            shared.sum(torch.ones(100))


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
