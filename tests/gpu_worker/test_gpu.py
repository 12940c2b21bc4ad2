"""The worker on a GPU: the same tokens by every path, no waiting, and enough memory."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_worker.kv.allocation import PagedAllocator
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup import build
from gpu_worker.startup.build import Worker, build_worker
from gpu_worker.startup.gpu_budget import StepMemory
from gpu_worker.startup.step_profile import StepProfile, measure_steps, peak_bytes
from gpu_worker.step.cuda_graphs import GraphRunner
from gpu_worker.step.executor import Executor
from tests.gpu_worker.conftest import MakeWorker, prompt
from tests.gpu_worker.everything import DRAWN, FILTERED, PENALIZED, everything
from tests.gpu_worker.overlapping import Overlapping
from tests.gpu_worker.planner import Planner, sampling, step_plan
from tests.support.models import SERVED, tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

if torch.cuda.is_available():
    pytest.importorskip("triton")
    from kernels.triton.backend import TritonBackend

SIZES: dict[str, Any] = {"num_blocks": 128, "max_num_sequences": 32}


@pytest.fixture(scope="module")
def on_cpu(make_worker: MakeWorker) -> list[list[int]]:
    return everything(Planner(make_worker("llama", num_blocks=128).executor))


@pytest.fixture(scope="module")
def with_graphs(make_worker: MakeWorker) -> Worker:
    return make_worker("llama", device="cuda", **SIZES)


@pytest.fixture
def executor(with_graphs: Worker) -> Iterator[Executor]:
    with_graphs.executor.reset()
    yield with_graphs.executor
    with_graphs.executor.reset()


@pytest.mark.parametrize("overlap", [False, True])
def test_without_graphs_tokens_are_those_of_the_cpu(
    make_worker: MakeWorker, on_cpu: list[list[int]], overlap: bool
) -> None:
    executor = make_worker("llama", device="cuda", cuda_graphs="off", **SIZES).executor
    assert not isinstance(executor.runner, GraphRunner)
    assert everything(Planner(Overlapping(executor) if overlap else executor)) == on_cpu  # type: ignore[arg-type]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("backend", ["triton", "sdpa"])
def test_in_virtual_memory_tokens_are_those_of_the_cpu(
    tmp_path: Path, backend: str, overlap: bool
) -> None:
    pytest.importorskip("cuda.bindings")
    # 256 tokens of this model are a page of two megabytes.
    path = tiny_model("llama", tmp_path, num_hidden_layers=8, head_dim=64)
    found = []
    for device, kv_memory in (("cpu", "paged"), ("cuda", "virtual")):
        settings = WorkerSettings(
            model=str(path),
            dtype="float32",
            device=device,
            kv_memory=kv_memory,
            attention_backend=backend if device == "cuda" else None,
            block_size=256,
            num_blocks=4,
            max_num_sequences=8,
        )
        own = build_worker(settings).executor
        if device == "cuda":
            assert isinstance(own.runner, GraphRunner) == (backend == "triton")
        planner = Planner(Overlapping(own) if overlap else own)  # type: ignore[arg-type]
        planner.admit(1, prompt(45))
        planner.admit(2, prompt(12, 2))
        planner.step(s1=45, s2=12)
        found.append([planner.run(1, 9)[:9], planner.run(2, 9)[:9]])
    assert found[0] == found[1]


@pytest.mark.parametrize("overlap", [False, True])
def test_graphs_change_no_token(executor: Executor, on_cpu: list[list[int]], overlap: bool) -> None:
    assert isinstance(executor.runner, GraphRunner)
    assert everything(Planner(Overlapping(executor) if overlap else executor)) == on_cpu  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", SERVED)
def test_every_kind_can_be_captured(make_worker: MakeWorker, kind: str) -> None:
    found = []
    for settings in ({"device": "cpu"}, {"device": "cuda", "max_num_sequences": 8}):
        worker = make_worker(kind, max_num_batched_tokens=64, **settings)
        planner = Planner(worker.executor)
        planner.admit(1, prompt(50))
        planner.step(s1=50)
        planner.admit(2, prompt(11, 2))
        planner.step(s2=11)
        found.append([planner.run(1, 12)[:12], planner.run(2, 10)[:10]])
    assert isinstance(worker.executor.runner, GraphRunner)
    assert found[0] == found[1]


def test_layers_are_fused_and_can_be_left_as_they_are(
    make_worker: MakeWorker, with_graphs: Worker, on_cpu: list[list[int]]
) -> None:
    fused = {type(module).__name__ for module in with_graphs.executor._model.model.modules()}
    assert {"JoinedLinear", "TritonGatedMLP", "TritonRMSNorm"} <= fused
    worker = make_worker("llama", device="cuda", layer_kernels="off", **SIZES)
    own = {type(module).__name__ for module in worker.executor._model.model.modules()}
    assert not any(name.startswith(("Joined", "Triton")) for name in own)
    assert everything(Planner(worker.executor)) == on_cpu


def test_deterministic_log_probabilities_do_not_depend_on_the_batch(
    make_worker: MakeWorker,
) -> None:
    settings = {"dtype": "bfloat16", "deterministic": True, "cuda_graphs": "off", **SIZES}
    executor = make_worker("llama", device="cuda", **settings).executor
    found = []
    for num_others in (0, 7):
        executor.reset()
        planner = Planner(executor)
        planner.admit(1, prompt(45), sampling(num_logprobs=1))
        sizes = {"s1": 45}
        for handle in range(2, 2 + num_others):
            planner.admit(handle, prompt(5 * handle, handle))
            sizes[f"s{handle}"] = 5 * handle
        planner.step(**sizes)
        planner.run(1, 20)
        found.append([result.logprobs[0].logprob for result in planner.results])
    assert len(found[0]) == 20
    assert found[0] == found[1]


def test_compiled_layers_can_be_captured(make_worker: MakeWorker, on_cpu: list[list[int]]) -> None:
    worker = make_worker("llama", device="cuda", compile=True, **SIZES)
    assert isinstance(worker.executor.runner, GraphRunner)
    assert everything(Planner(worker.executor)) == on_cpu


@pytest.mark.alone_on_gpu
@pytest.mark.parametrize(
    "params",
    [sampling(), DRAWN, FILTERED, PENALIZED],
    ids=["greedy", "drawn", "filtered", "penalized"],
)
def test_a_step_begins_without_waiting_for_the_one_before(
    executor: Executor, params: object
) -> None:
    planner = Planner(executor)
    planner.admit(1, prompt(20), params)  # type: ignore[arg-type]
    planner.admit(2, prompt(30, 2), params)  # type: ignore[arg-type]
    planner.step(s1=20, s2=30)
    for _ in range(3):
        planner.step()
    expected_after = executor.batch.num_tokens.max()
    first = executor.begin(step_plan(5))
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second
    busy = torch.cuda.Event()
    busy.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        executor.finish(first)
        second = executor.begin(step_plan(6))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not busy.query(), "the next step is to begin while the device is busy"
    result = executor.finish(second)
    assert result.handles.tolist() == [1, 2]
    assert executor.batch.num_tokens.max() == expected_after + 2


@pytest.mark.alone_on_gpu
def test_times_are_those_of_the_device(executor: Executor) -> None:
    planner = Planner(executor)
    planner.admit(1, prompt(20))
    planner.step(s1=20)
    torch.cuda._sleep(500_000_000)  # before the step: no part of its forward pass
    result = planner.step()
    assert 0 < result.model_us < 100_000
    assert result.step_us > 2 * result.model_us


@pytest.mark.alone_on_gpu
def test_the_measured_step_leaves_room_for_every_other(make_worker: MakeWorker) -> None:
    limits = {"max_num_batched_tokens": 400, "max_num_sequences": 16}
    worker = make_worker("llama", device="cuda", cuda_graphs="off", num_blocks=512, **limits)
    executor, device = worker.executor, torch.device("cuda")
    model = executor._model
    profile = StepProfile(
        model, model.observe_layers(), TritonBackend(), PagedAllocator(16, device), 512
    )
    measured = measure_steps(profile, 400, 16, None, device).activation_bytes
    assert measured > 400 * 96 * 4  # at least one activation of all tokens

    def largest_steps() -> None:
        planner = Planner(executor)
        for handle in range(1, 16):
            params = replace(FILTERED, repetition_penalty=1.2)
            planner.admit(handle, prompt(380, handle), params)
            planner.step(**{f"s{handle}": 380})
        planner.run(15, 5)

    assert peak_bytes(largest_steps, device) <= measured + 2 * 2**20


@pytest.mark.alone_on_gpu
def test_graphs_take_no_more_than_was_kept_for_them(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[StepMemory] = []
    measure = build.measure_steps

    def noting(*arguments: object) -> StepMemory:
        measured.append(measure(*arguments))  # type: ignore[arg-type]
        return measured[-1]

    monkeypatch.setattr(build, "measure_steps", noting)
    captured: list[int] = []
    capture = Executor.capture_graphs

    def measuring(executor: Executor, *arguments: object) -> None:
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        capture(executor, *arguments)  # type: ignore[arg-type]
        torch.cuda.empty_cache()
        captured.append(free - torch.cuda.mem_get_info()[0])

    monkeypatch.setattr(Executor, "capture_graphs", measuring)
    make_worker("llama", device="cuda", num_blocks=None)
    assert captured[0] <= measured[0].graph_bytes
