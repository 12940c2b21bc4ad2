"""The paths of GPUs without one: NCCL is a class of the test, which adds through gloo."""

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar

import pytest
import torch
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed import distributed_c10d

from gpu_worker.ranks import collectives
from gpu_worker.ranks.collectives import TorchCollectives
from gpu_worker.ranks.member import GroupOver, Member
from gpu_worker.ranks.ranks import Ranks
from gpu_worker.ranks.reducer import DeviceReducer
from tests.gpu_worker.ranks.rank_threads import RankThreads

_GPU = torch.device("cuda", 0)


@dataclass
class _Options:
    _timeout: timedelta = timedelta()


@dataclass
class _Work:
    error: str = ""

    def wait(self) -> None:
        if self.error:
            raise RuntimeError(self.error)


class FakeNccl:
    """NCCL's process group as the worker uses it, alone in its group: a sum doubles.

    Attributes:
        timeouts: of the calls so far.
    """

    Options = _Options
    made: ClassVar[list["FakeNccl"]] = []

    def __init__(self, store: Store, rank: int, size: int, options: _Options) -> None:
        self.store, self.rank, self.size, self.options = store, rank, size, options
        self.timeouts: list[timedelta] = []
        self.aborted = 0
        self.error = ""
        self.made.append(self)

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> _Work:
        self.timeouts.append(options.timeout)
        if not self.error:
            tensors[0].mul_(self.size)
        return _Work(self.error)

    def allgather(
        self, found: list[list[torch.Tensor]], tensors: list[torch.Tensor], options: Any
    ) -> _Work:
        self.timeouts.append(options.timeout)
        for rank, each in enumerate(found[0]):
            each.copy_(tensors[0] * 10**rank)
        return _Work(self.error)

    def broadcast(self, tensors: list[Any], options: Any) -> _Work:
        self.timeouts.append(options.timeout)
        return _Work(self.error)

    def abort(self) -> None:
        self.aborted += 1


@dataclass
class _OnGpu:
    """A tensor of which only the place matters."""

    is_cuda: bool = field(default=True)


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> list[FakeNccl]:
    monkeypatch.setattr(FakeNccl, "made", [])
    monkeypatch.setattr(distributed_c10d, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(collectives, "_gloo", lambda *_: None)
    return FakeNccl.made


def connected(num_ranks: int = 2, group: str = "a", **settings: Any) -> TorchCollectives:
    member = Member(1, num_ranks, group)
    return TorchCollectives(member, HashStore(), "127.0.0.1", _GPU, **settings)


def test_tensors_of_gpus_are_added_by_nccl_in_float32_and_rounded_once(
    nccl: list[FakeNccl],
) -> None:
    ranks = Ranks.of(connected(), _GPU)
    assert isinstance(ranks.reducer, DeviceReducer)
    partial = torch.tensor([1.0, 2.5], dtype=torch.bfloat16)
    total = ranks.reducer.sum(partial, torch.bfloat16)
    assert (total.tolist(), total.dtype) == ([2.0, 5.0], torch.bfloat16)
    assert partial.tolist() == [1.0, 2.5], "it may be an input of another op"
    assert (nccl[0].rank, nccl[0].size) == (1, 2)
    assert (ranks.failure(), ranks.sums_s()) == (None, None)


def test_numbers_go_through_gloo_where_tensors_go_through_nccl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FakeNccl, "made", [])
    monkeypatch.setattr(distributed_c10d, "ProcessGroupNCCL", FakeNccl, raising=False)
    pair = RankThreads(2)
    ranks = pair.connect(device=_GPU)
    assert (
        pair.run(lambda rank: ranks[rank].collectives.gather([rank, 7])) == [[[0, 7], [1, 7]]] * 2
    )
    assert [each.timeouts for each in FakeNccl.made] == [[], []]
    pair.close()


def test_each_call_has_the_deadline_of_the_step(nccl: list[FakeNccl]) -> None:
    found = connected()
    assert nccl[0].options._timeout == timedelta(seconds=600), "while models load"
    found.set_deadline(7.5)
    found.sum(torch.ones(2))
    found.broadcast(_OnGpu())  # type: ignore[arg-type]
    assert nccl[0].timeouts == [timedelta(seconds=7.5)] * 2


def test_more_than_two_ranks_add_in_their_order_if_asked(nccl: list[FakeNccl]) -> None:
    x = torch.ones(2)
    connected(3, in_rank_order=True).sum(x)
    assert x.tolist() == [111.0, 111.0], "gathered, and added here"
    y = torch.ones(2)
    connected(2, in_rank_order=True).sum(y)
    assert y.tolist() == [2.0, 2.0], "two have one order"


def test_a_communicator_that_was_aborted_ends_the_group(nccl: list[FakeNccl]) -> None:
    found = connected(group="of instances 5 and 9")
    nccl[0].error = "NCCL communicator was aborted on rank 1.\nmore"
    with pytest.raises(
        GroupOver,
        match=r"^rank 1 of group of instances 5 and 9: a sum failed: NCCL .* aborted on rank 1\.$",
    ):
        found.sum(torch.ones(1))


def test_a_rank_that_leaves_aborts_what_still_runs_on_its_gpu_once(nccl: list[FakeNccl]) -> None:
    found = connected()
    found.close()
    found.close()
    assert nccl[0].aborted == 1


def test_generations_of_a_group_never_meet_in_one_store(nccl: list[FakeNccl]) -> None:
    store = HashStore()
    for group in ("first", "second"):
        TorchCollectives(Member(0, 2, group), store, "127.0.0.1", _GPU)
    nccl[0].store.set("address", "here")
    assert [each.store.check(["address"]) for each in nccl] == [True, False]
    assert store.get("first/nccl/address") == b"here"
