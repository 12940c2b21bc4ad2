"""Runs on the virtual clock lose nothing, add nothing, and are reproducible by seed."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.simulator.findings.outcome import Outcome
from benchmarks.simulator.pagestream import PageStream, PageStreamConfig
from benchmarks.simulator.routers import least_loaded, round_robin
from benchmarks.simulator.system import SimRequest, Work
from benchmarks.simulator.virtual_clock import run, run_many
from benchmarks.simulator.worker.hardware import find_gpu
from benchmarks.simulator.worker.model_shapes import find_model
from benchmarks.simulator.worker.worker_model import WorkerModel
from benchmarks.simulator.workloads import Workload
from scheduler_svc.core.scheduler import Scheduler
from shared.bus.api import EntryId
from shared.messages.requests import Submit
from shared.sampling import SamplingParams
from tests.support.fake_worker import FakeWorker

WORKER = WorkerModel(find_model("OPT-13B"), find_gpu("A100-40G"))
SMALL = PageStreamConfig(kv_slots=2_400, max_num_batched_tokens=512, max_model_len=1_024)


def requests(count: int = 60, rate: float = 4.0, seed: int = 1) -> list[SimRequest]:
    random = np.random.default_rng(seed)
    arrivals = np.cumsum(random.exponential(1 / rate, count))
    lengths = random.integers(1, 300, (count, 2))
    return [
        SimRequest(number, float(arrival), int(prompt), int(output))
        for number, (arrival, (prompt, output)) in enumerate(zip(arrivals, lengths, strict=True))
    ]


def serve(
    config: PageStreamConfig = SMALL, found: list[SimRequest] | None = None, seed: int = 0
) -> Outcome:
    asked = requests() if found is None else found
    return run(PageStream(WORKER, config, seed), asked, WORKER, sample_every_s=0.05)


def check_conservation(
    outcome: Outcome, asked: list[SimRequest], num_choices: int | None = 1
) -> None:
    """Every request is served with all tokens, in a possible order; memory shares add up."""
    assert sorted(outcome.ids.tolist()) == [request.id for request in asked]
    by_id = {request.id: request for request in asked}
    for row, request_id in enumerate(outcome.ids.tolist()):
        request = by_id[request_id]
        assert outcome.output_tokens[row] == request.output_tokens
        assert request.arrival_s < outcome.first_tokens_s[row] <= outcome.ends_s[row]
    if num_choices is not None:
        num_tokens = sum(request.output_tokens for request in asked)
        assert outcome.num_tokens == num_choices * num_tokens
    assert outcome.num_unfinished == outcome.num_refused == 0
    assert sum(outcome.limits_s.values()) == pytest.approx(outcome.busy_s)
    for moment in outcome.moments:
        use = moment.memory
        parts = (use.token_states, use.reserved, use.internal, use.external, use.free)
        assert sum(parts) == use.total
        assert min(parts) >= 0


@pytest.mark.parametrize("preemption", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_all_requests_are_served_though_memory_is_short(
    preemption: str, plans_in_flight: int
) -> None:
    config = replace(SMALL, preemption=preemption, max_plans_in_flight=plans_in_flight)
    outcome = serve(config)
    check_conservation(outcome, requests())
    assert outcome.num_preemptions > 10


def test_the_same_seed_gives_the_same_run_and_another_one_does_not() -> None:
    workload = Workload("sharegpt-like", 1_024)

    def ends(seed: int) -> list[float]:
        asked = list(workload.requests(3.0, 8.0, seed))
        return serve(SMALL, asked).ends_s.tolist()

    assert ends(1) == ends(1)
    assert ends(1) != ends(2)


def test_samples_share_their_prompt() -> None:
    asked = [replace(request, num_samples=3) for request in requests()]
    outcome = serve(SMALL, asked)
    check_conservation(outcome, asked, num_choices=3)
    assert 0.1 < outcome.mean_saved < 0.67
    alone = serve(SMALL)
    assert alone.mean_saved == 0


def test_beams_share_more_than_samples_and_their_draws_follow_from_the_seed() -> None:
    asked = [replace(request, beam_width=3) for request in requests(15)]
    outcome = serve(SMALL, asked)
    check_conservation(outcome, asked, num_choices=None)
    samples = [replace(request, num_samples=3) for request in requests(15)]
    assert outcome.mean_saved > serve(SMALL, samples).mean_saved
    assert serve(SMALL, asked).mean_saved == outcome.mean_saved
    assert serve(SMALL, asked, seed=1).mean_saved != outcome.mean_saved


def test_prompts_that_begin_alike_are_computed_once() -> None:
    shared = tuple(range(900, 910))  # 160 tokens
    asked = [
        SimRequest(number, float(number), 200, 5, prefix=shared, prefix_block_tokens=16)
        for number in range(10)
    ]
    outcome = serve(SMALL, asked)
    assert outcome.num_prefill_tokens == 200 + 9 * 40
    other = [replace(asked[0], id=1, prefix=(*shared[:5], 7, *shared[6:]), arrival_s=1.0)]
    outcome = serve(SMALL, [asked[0], *other])
    assert outcome.num_prefill_tokens == 200 + 120


def test_preempted_requests_without_swapping_are_computed_again() -> None:
    config = replace(SMALL, preemption="recompute", prefix_caching=False)
    outcome = serve(config)
    assert outcome.num_prefill_tokens > sum(request.prompt_tokens for request in requests())


def test_a_request_that_can_never_be_served_is_refused() -> None:
    asked = [SimRequest(0, 0.0, 10, 5), SimRequest(1, 0.5, 1_024, 5), SimRequest(2, 1.0, 10, 5)]
    outcome = serve(SMALL, asked)
    assert outcome.ids.tolist() == [0, 2]
    assert outcome.num_refused == 1


def test_a_run_can_be_stopped_before_all_are_served() -> None:
    outcome = run(PageStream(WORKER, SMALL), requests(), WORKER, until_s=5.0)
    assert outcome.end_s <= 5.0
    assert (outcome.ends_s <= 5.0).all()
    arrived = sum(request.arrival_s <= 5.0 for request in requests())
    assert len(outcome.ids) + outcome.num_unfinished == arrived
    assert outcome.num_unfinished > 0


def test_requests_must_be_in_the_order_of_their_arrival() -> None:
    asked = [SimRequest(0, 1.0, 5, 5), SimRequest(1, 0.5, 5, 5)]
    with pytest.raises(ValueError, match=r"request 1 arrives at 0\.5 s, request 0 before it"):
        serve(SMALL, asked)


def test_latencies_of_a_single_request_add_up_from_its_iterations() -> None:
    outcome = serve(SMALL, [SimRequest(7, 2.0, 100, 3)])
    prefill = WORKER.seconds(Work(prefill_tokens=100, prefill_context=5_050, sampled_rows=1))
    decodes = [
        WORKER.seconds(Work(decode_tokens=1, decode_context=context, sampled_rows=1))
        for context in (101, 102)
    ]
    assert outcome.ttfts_s.tolist() == [pytest.approx(prefill)]
    assert outcome.tpots_s.tolist() == [pytest.approx(sum(decodes) / 2)]
    latency = prefill + sum(decodes)
    assert outcome.normalized_latencies_s.tolist() == [pytest.approx(latency / 3)]
    assert outcome.busy_s == pytest.approx(latency)
    assert outcome.mean_batched == 1


def test_engines_share_the_load() -> None:
    asked = requests(50, rate=20.0)
    for router in (round_robin, least_loaded):
        systems = [PageStream(WORKER, SMALL) for _ in range(4)]
        outcome = run_many(systems, asked, WORKER, router=router(4), sample_every_s=0.5)
        check_conservation(outcome, asked)
        assert outcome.ends_s.max() < 0.6 * serve(SMALL, asked).ends_s.max()


def test_the_least_loaded_is_the_one_with_the_fewest_requests() -> None:
    assert least_loaded(3)([2, 1, 1]) == 1


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_work_equals_that_of_a_worker_that_executes_the_plans(preemption: str) -> None:
    """Work per step, against a worker that keeps every token of every block."""
    config = PageStreamConfig(
        block_size=8,
        max_num_sequences=32,
        max_num_batched_tokens=96,
        kv_slots=480,
        max_model_len=256,
        preemption=preemption,
    )
    system, core = PageStream(WORKER, config), Scheduler(config.for_core(WORKER))
    worker = FakeWorker(8, 96, lambda handle, position: (0, False))
    random = np.random.default_rng(5)
    plans, num_steps = [], 0
    for number in range(1_000):
        if number < 60:
            prompt, output = (int(found) for found in random.integers(1, 60, 2))
            system.submit(SimRequest(number, 0.0, prompt, output))
            core.apply(_submit(number, prompt, output), EntryId(1, 0))
        while (plan := core.schedule(0)) is not None:
            plans.append(plan)
        work = system.start(0.0)
        assert (work is None) == (not plans)
        if work is None:
            break
        result = worker.execute(plans.pop(0))
        assert work.prefill_tokens + work.decode_tokens == result.num_batched_tokens
        assert work.sampled_rows == len(result.handles)
        core.apply(result, EntryId(1, 0))
        assert system.finish(0.0).num_tokens == len(result.handles)
        num_steps += 1
    assert num_steps > 100
    assert system.num_preemptions > 5


def _submit(number: int, prompt: int, output: int) -> Submit:
    return Submit(
        request_id=str(number),
        gateway="",
        attachment="",
        prompt=np.full(prompt, (1 << 30) + number, np.int32),
        sampling=SamplingParams.greedy(output),
        received_ms=0,
        num_choices=1,
        priority=0,
        cache_salt="",
    )
