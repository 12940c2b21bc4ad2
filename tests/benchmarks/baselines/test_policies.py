"""The baselines on cases that can be followed by hand."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.baselines.faster_transformer import FasterTransformer
from benchmarks.baselines.orca import Orca, Reservation
from benchmarks.baselines.vattention import PageGroups, VAttention
from benchmarks.simulator.system import MemoryUse, SimRequest, System, Work

_REQUESTS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 24), st.integers(1, 3)), min_size=1, max_size=25
)


def _request(number: int, prompt: int, output: int, samples: int = 1, beams: int = 0) -> SimRequest:
    return SimRequest(number, 0.0, prompt, output, num_samples=samples, beam_width=beams)


def _step(system: System) -> tuple[Work, tuple[int, ...]]:
    work = system.start(0.0)
    assert work is not None
    return work, system.finish(0.0).finished


def _parts(use: MemoryUse) -> int:
    return use.token_states + use.reserved + use.internal + use.external + use.free


def _run(system: System, requests: Iterable[SimRequest]) -> tuple[list[int], int, int]:
    """Serve requests; their order of completion, generated tokens, and most running at once."""
    for request in requests:
        system.submit(request)
    ended: list[int] = []
    started: list[int] = []
    num_tokens = most = 0
    while system.start(0.0) is not None:
        most = max(most, system.num_running)
        assert _parts(system.memory()) == system.memory().total
        progress = system.finish(0.0)
        assert _parts(system.memory()) == system.memory().total
        started.extend(progress.first_tokens)
        ended.extend(progress.finished)
        num_tokens += progress.num_tokens
    assert sorted(started) == sorted(ended), "each has one first token"
    assert system.memory().token_states == 0
    assert system.num_running == system.num_waiting == 0
    return ended, num_tokens, most


@pytest.mark.parametrize(
    ("reservation", "slots"),
    [(Reservation.MAX, 2_048), (Reservation.POW2, 100 + 32), (Reservation.ORACLE, 100 + 25)],
)
def test_reservations_are_those_of_the_papers_example(reservation: Reservation, slots: int) -> None:
    assert reservation.num_slots(_request(1, prompt=100, output=25), 2_048) == slots


def test_no_reservation_is_longer_than_the_model() -> None:
    assert Reservation.POW2.num_slots(_request(1, prompt=1_000, output=1_030), 2_048) == 2_048


def test_orca_max_runs_as_many_as_have_room_for_the_longest() -> None:
    system = Orca(15_700, Reservation.MAX)
    _, _, most = _run(system, [_request(number, 5, 3) for number in range(20)])
    assert most == 7


def test_orca_distinguishes_the_kinds_of_waste() -> None:
    system = Orca(128, Reservation.POW2, max_len=64)
    system.submit(_request(1, prompt=10, output=5))  # reserves 18, gets 32
    system.start(0.0)
    assert system.memory() == MemoryUse(128, 10, reserved=5, internal=3, external=14, free=96)
    system.finish(0.0)
    assert system.memory() == MemoryUse(128, 11, reserved=4, internal=3, external=14, free=96)
    system.submit(_request(2, prompt=30, output=30))
    system.submit(_request(3, prompt=30, output=30))
    system.start(0.0)  # of 96 only one run of 64 can be had
    assert (system.num_running, system.num_waiting) == (2, 1)
    assert system.memory().free == 0, "slots that no waiting request can use are lost"


def test_orca_admits_in_every_iteration_and_answers_each_request_when_it_is_complete() -> None:
    system = Orca(64, Reservation.ORACLE, max_len=64)
    for number, output in [(1, 3), (2, 1), (3, 2)]:
        system.submit(_request(number, prompt=20, output=output))  # 32 slots each
    work, ended = _step(system)
    assert (work.prefill_tokens, work.decode_tokens, work.sampled_rows) == (40, 0, 2)
    assert work.prefill_context == 2 * (20 * 21 // 2)
    assert ended == (2,)
    work, ended = _step(system)
    assert (work.prefill_tokens, work.decode_tokens, work.decode_context) == (20, 1, 21)
    assert ended == ()
    work, ended = _step(system)
    assert (work.prefill_tokens, work.decode_tokens, work.decode_context) == (0, 2, 22 + 21)
    assert ended == (1, 3)
    assert system.start(0.0) is None


def test_orca_admits_no_later_request_before_the_first_that_does_not_fit() -> None:
    system = Orca(64, Reservation.ORACLE, max_len=64)
    for number, prompt in [(1, 30), (2, 40), (3, 1)]:
        system.submit(_request(number, prompt, output=2))
    assert _step(system)[0].prefill_tokens == 30


def test_orca_shares_nothing_between_samples_or_beams() -> None:
    for wide in (_request(1, 10, 4, samples=3), _request(1, 10, 4, beams=3)):
        system = Orca(64, Reservation.ORACLE, max_len=64)
        system.submit(wide)
        work, _ = _step(system)
        assert (work.prefill_tokens, work.sampled_rows) == (30, 3)
        assert system.memory().token_states == 3 * 11


def test_orca_copies_all_that_the_beams_of_a_request_have_in_every_iteration() -> None:
    system = Orca(256, Reservation.ORACLE, max_len=64, copied_bytes_per_token=3.0)
    system.submit(_request(1, 10, 4, beams=2))
    system.submit(_request(2, 20, 4))
    copied = [_step(system)[0].copied_bytes for _ in range(3)]
    assert copied == [3 * 10, 3 * 11, 3 * 12], "what has no beams copies nothing"
    alone = Orca(256, Reservation.ORACLE, max_len=64)
    alone.submit(_request(1, 10, 4, beams=2))
    assert _step(alone)[0].copied_bytes == 0


def test_orca_refuses_what_can_never_run() -> None:
    system = Orca(100, Reservation.ORACLE, max_len=80)
    with pytest.raises(ValueError, match="81 tokens, at most 80 are possible"):
        system.submit(_request(1, 40, 41))
    with pytest.raises(ValueError, match="2 x 60 slots do not fit into 100"):
        system.submit(_request(1, 40, 20, samples=2))


@given(_REQUESTS, st.sampled_from(list(Reservation)), st.integers(192, 700))
def test_orca_completes_every_request(
    rows: list[tuple[int, int, int]], reservation: Reservation, num_slots: int
) -> None:
    requests = [_request(number, *row) for number, row in enumerate(rows)]
    ended, num_tokens, _ = _run(Orca(num_slots, reservation, max_len=64), requests)
    assert sorted(ended) == list(range(len(rows)))
    assert num_tokens == sum(output * samples for _, output, samples in rows)


def test_faster_transformer_answers_a_batch_when_its_longest_is_complete() -> None:
    system = FasterTransformer(250, max_len=100)
    assert system.largest_batch == 2
    for number, prompt, output in [(1, 10, 1), (2, 4, 3), (3, 5, 1)]:
        system.submit(_request(number, prompt, output))
    work, ended = _step(system)
    assert (work.prefill_tokens, work.sampled_rows, ended) == (2 * 10, 2, ())
    assert system.memory() == MemoryUse(
        250, 11 + 5, reserved=2, internal=200 - 18, external=50, free=0
    )
    assert _step(system)[1] == ()
    work, ended = _step(system)
    assert (work.decode_tokens, work.decode_context, ended) == (2, 2 * 12, (1, 2))
    assert _step(system) == (Work(prefill_tokens=5, prefill_context=15, sampled_rows=1), (3,))


def test_faster_transformer_does_not_wait_for_a_full_batch() -> None:
    system = FasterTransformer(400, max_len=100)
    system.submit(_request(1, 3, 5))
    assert _step(system)[0].sampled_rows == 1
    system.submit(_request(2, 3, 5))
    assert system.num_waiting == 1


@given(_REQUESTS)
def test_faster_transformer_completes_every_request(rows: list[tuple[int, int, int]]) -> None:
    requests = [_request(number, *row) for number, row in enumerate(rows)]
    ended, num_tokens, most = _run(FasterTransformer(256, max_len=64), requests)
    assert sorted(ended) == list(range(len(rows)))
    assert num_tokens == sum(output * samples for _, output, samples in rows)
    assert most <= 4


def test_a_page_group_holds_the_tokens_of_table_8() -> None:
    yi_6b = PageGroups(2 << 20, num_layers=32, num_kv_heads=4, head_dim=128)
    llama_tp2 = PageGroups(64 << 10, num_layers=32, num_kv_heads=4, head_dim=128)
    assert (yi_6b.block_size, llama_tp2.block_size) == (2_048, 64)
    assert yi_6b.num_blocks_in(10 * 64 * (2 << 20)) == 10


def _small_groups() -> PageGroups:
    return PageGroups(64, num_layers=2, num_kv_heads=1, head_dim=4)  # 8 tokens, 4 tensors


def test_vattention_maps_a_group_in_every_tensor_as_a_request_grows() -> None:
    system = VAttention(_small_groups(), memory_bytes=64 * 4 * 10)
    system.submit(_request(1, prompt=7, output=3))
    assert _step(system)[0].mapped_pages == 4
    assert system.memory() == MemoryUse(80, 8, reserved=0, internal=0, external=0, free=72)
    assert _step(system)[0].mapped_pages == 4
    assert system.memory().internal == 7


def test_vattention_hands_mapped_groups_of_a_complete_request_on() -> None:
    system = VAttention(_small_groups(), memory_bytes=64 * 4 * 10)
    system.submit(_request(1, prompt=20, output=1))
    assert _step(system)[0].mapped_pages == 3 * 4
    system.submit(_request(2, prompt=30, output=1))
    assert _step(system)[0].mapped_pages == 1 * 4


def test_vattention_preempts_the_latest_and_readmits_it_first() -> None:
    system = VAttention(_small_groups(), memory_bytes=64 * 4 * 3, watermark=0.0)
    for number in (1, 2, 3):
        system.submit(_request(number, prompt=6, output=9))
    assert _step(system)[0].prefill_tokens == 18
    _step(system)
    work, _ = _step(system)  # all three are full: 1 takes the block of 3, 2 has to go
    assert work.decode_tokens == 1
    assert (system.num_running, system.num_waiting, system.num_preemptions) == (1, 2, 2)
    ended = [
        number for _ in range(40) if system.start(0.0) for number in system.finish(0.0).finished
    ]
    assert ended == [1, 2, 3]


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 24)), min_size=1, max_size=25))
def test_vattention_completes_every_request(rows: list[tuple[int, int]]) -> None:
    requests = [_request(number, *row) for number, row in enumerate(rows)]
    system = VAttention(_small_groups(), memory_bytes=64 * 4 * 9)
    ended, num_tokens, _ = _run(system, requests)
    assert sorted(ended) == list(range(len(rows)))
    assert num_tokens == sum(output for _, output in rows)
