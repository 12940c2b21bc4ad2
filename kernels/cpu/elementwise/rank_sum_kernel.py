"""CPU kernels that add tensors over the ranks of a group, through memory that they share.

The segment has a counter for each rank, and room for two chunks of numbers. A rank writes its
numbers, then counts; when all have counted as far, it reads theirs. It writes over a chunk two
exchanges later: by then every rank has counted for the one between, so it has read that chunk.
"""

# ruff: noqa: ARG001 - numba calls an intrinsic with types to learn what to emit

from functools import cache

import torch
from numba import njit, types
from numba.extending import intrinsic

from kernels.cpu.runtime import simd
from kernels.cpu.runtime.entry_points import Kernel, compile_kernel, element_tag
from kernels.cpu.runtime.graph_executor import run_kernel
from kernels.cpu.runtime.kernel_arguments import ArgumentLayout
from kernels.cpu.runtime.memory import (
    claim_task,
    copy_bytes,
    field,
    item_bytes,
    load_element,
    load_i64,
    store_element,
    store_i64,
)
from kernels.cpu.runtime.simd import LANES, float32_tag
from kernels.cpu.runtime.waiting import call, call_clock, load_acquire, pause, store_release

# Arguments, behind the two counters.
INPUT, OUTPUT = 2, 3
ELEMENTS = 4  # in an exchange of bytes: bytes
SEGMENT = 5
RANK, NUM_RANKS = 6, 7
LONG_WAIT = 8  # ``void function(int64 args)``: returns when all ranks have counted, or fails
STATE = 9  # of this process: see below
CLOCK, SCHED_YIELD = 10, 11  # functions of C; SCHED_YIELD zero: there is none
RANK_SUM_LAYOUT = ArgumentLayout(12, rows=ELEMENTS)

# The state: int64 numbers.
FAILED = 0  # not zero: exchanges return at once
NANOSECONDS = 1  # in sums so far
NUM_SUMS, SUM_BYTES = 2, 3  # so far, and what this rank gave into them
TIMES = 4  # of the clock, two pairs
STATE_FIELDS = 8

# The segment, in bytes.
COUNTER_BYTES = 128  # two cache lines, since processors fetch pairs of them
CHUNK_ELEMENTS = 64 * 1024  # float32
_CHUNK_BYTES = 4 * CHUNK_ELEMENTS
_PAGE_BYTES = 4096

_SPINS = 2_000  # reads of a counter before the core is yielded: some 50 microseconds
_YIELDS = 4_000  # before the function for long waits is called: some milliseconds


def segment_bytes(num_ranks: int) -> int:
    """The size of a segment."""
    return int(_data.py_func(0, 0, 0, num_ranks)) + 2 * num_ranks * _CHUNK_BYTES


@njit
def _data(segment, number, rank, num_ranks):
    """Address of a rank's chunk in an exchange, by its number."""
    counters = (num_ranks * COUNTER_BYTES + _PAGE_BYTES - 1) // _PAGE_BYTES * _PAGE_BYTES
    return segment + counters + ((number & 1) * num_ranks + rank) * _CHUNK_BYTES


@njit
def rank_sum_tasks(args, from_tag, to_tag):
    """output = the sum of all ranks' inputs in their order, in float32, rounded once."""
    if claim_task(args) != 0:
        return
    state, clock = field(args, STATE), field(args, CLOCK)
    begin_ns = call_clock(clock, state + 8 * TIMES)
    elements, num_ranks = field(args, ELEMENTS), field(args, NUM_RANKS)
    segment, rank = field(args, SEGMENT), field(args, RANK)
    source, target = field(args, INPUT), field(args, OUTPUT)
    begin = 0
    while begin < elements and load_i64(state + 8 * FAILED) == 0:
        count = min(elements - begin, CHUNK_ELEMENTS)
        number = load_i64(segment + rank * COUNTER_BYTES) + 1
        own = _data(segment, number, rank, num_ranks)
        _widen(from_tag, source + begin * item_bytes(from_tag), own, count)
        if _exchange(args, number):
            first = _data(segment, number, 0, num_ranks)
            _add(to_tag, first, num_ranks, count, target + begin * item_bytes(to_tag))
        begin += count
    nanoseconds = call_clock(clock, state + 8 * TIMES) - begin_ns
    store_i64(state + 8 * NANOSECONDS, load_i64(state + 8 * NANOSECONDS) + nanoseconds)
    store_i64(state + 8 * NUM_SUMS, load_i64(state + 8 * NUM_SUMS) + 1)
    store_i64(state + 8 * SUM_BYTES, load_i64(state + 8 * SUM_BYTES) + 4 * elements)


@njit
def rank_gather_tasks(args):
    """output = the bytes of all ranks, at most a chunk of each, one rank after the other."""
    if claim_task(args) != 0 or load_i64(field(args, STATE) + 8 * FAILED) != 0:
        return
    num_bytes, num_ranks = field(args, ELEMENTS), field(args, NUM_RANKS)
    segment, rank = field(args, SEGMENT), field(args, RANK)
    number = load_i64(segment + rank * COUNTER_BYTES) + 1
    copy_bytes(_data(segment, number, rank, num_ranks), field(args, INPUT), num_bytes)
    if _exchange(args, number):
        for other in range(num_ranks):
            target = field(args, OUTPUT) + other * num_bytes
            copy_bytes(target, _data(segment, number, other, num_ranks), num_bytes)


@njit
def _exchange(args, number):
    """Count, and wait until all ranks have; whether they did."""
    segment, num_ranks = field(args, SEGMENT), field(args, NUM_RANKS)
    sched_yield = field(args, SCHED_YIELD)
    store_release(segment + field(args, RANK) * COUNTER_BYTES, number)
    waits = 0
    for other in range(num_ranks):
        counter = segment + other * COUNTER_BYTES
        while load_acquire(counter) < number:
            waits += 1
            if waits < _SPINS or sched_yield == 0:
                pause()
            elif waits < _SPINS + _YIELDS:
                call(sched_yield)  # the rank that is waited for may need this very core
            else:
                run_kernel(field(args, LONG_WAIT), args)
                if load_i64(field(args, STATE) + 8 * FAILED) != 0:
                    return False
    return True


@njit
def _widen(tag, source, target, count):
    """target = source in float32."""
    at = 0
    while at + LANES <= count:
        _widen_chunk(tag, source + at * item_bytes(tag), target + 4 * at)
        at += LANES
    while at < count:
        number = load_element(tag, source + at * item_bytes(tag))
        store_element(float32_tag, target + 4 * at, number)
        at += 1


@njit
def _add(tag, first, num_parts, count, target):
    """target = the sum of chunks that lie one behind the other, in their order."""
    at = 0
    while at + LANES <= count:
        _add_chunk(tag, first + 4 * at, num_parts, target + at * item_bytes(tag))
        at += LANES
    while at < count:
        total = load_element(float32_tag, first + 4 * at)
        for part in range(1, num_parts):
            total += load_element(float32_tag, first + part * _CHUNK_BYTES + 4 * at)
        store_element(tag, target + at * item_bytes(tag), total)
        at += 1


@intrinsic
def _widen_chunk(typingctx, tag, source, target):
    """Sixteen elements as float32."""

    def codegen(context, builder, signature, args):
        _, source, target = args
        simd.store(builder, simd.load_vector(builder, source, signature.args[0]), target, 4)

    return types.void(tag, types.int64, types.int64), codegen


@intrinsic
def _add_chunk(typingctx, tag, first, num_parts, target):
    """The sums of sixteen float32 of each part, rounded."""

    def codegen(context, builder, signature, args):
        _, first, num_parts, target = args

        def body(index, state):
            part = builder.add(index, simd.i64(1))
            at = simd.offset(builder, first, part, simd.i64(_CHUNK_BYTES))
            return [builder.fadd(state[0], simd.load(builder, at, simd.VF32, 4))]

        own = simd.load(builder, first, simd.VF32, 4)
        others = builder.sub(num_parts, simd.i64(1))
        (total,) = simd.loop(builder, others, [own], body)
        simd.store_vector(builder, total, target, signature.args[0])

    return types.void(tag, types.int64, types.int64, types.int64), codegen


@cache
def rank_sum_kernel(from_dtype: torch.dtype, to_dtype: torch.dtype) -> Kernel:
    """Sums of elements of one type, rounded to another.

    Raises:
        ValueError: no kernel serves the types.
    """
    tags = element_tag(from_dtype), element_tag(to_dtype)
    return compile_kernel(rank_sum_tasks, RANK_SUM_LAYOUT, *tags)


@cache
def rank_gather_kernel() -> Kernel:
    """Exchanges of bytes."""
    return compile_kernel(rank_gather_tasks, RANK_SUM_LAYOUT)
