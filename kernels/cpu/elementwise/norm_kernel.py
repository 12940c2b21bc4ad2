"""The CPU kernels of normalization: by the root mean square (Zhang and Sennrich, 2019), or by mean
and variance (Ba et al., 2016)."""

# ruff: noqa: ARG001 - numba calls an intrinsic with types to learn what to emit

import math
from functools import cache

import numpy as np
import torch
from numba import njit, types
from numba.extending import intrinsic

from kernels.cpu.elementwise import elementwise_arguments as fields
from kernels.cpu.runtime import simd
from kernels.cpu.runtime.entry_points import Kernel, compile_kernel, element_tag
from kernels.cpu.runtime.memory import claim_task, field, item_bytes, load_element
from kernels.cpu.runtime.simd import LANES, float32_tag, size_of


@njit
def norm_tasks(args, tag):
    """out = x / sqrt(mean(x^2) + epsilon) * weight for all rows."""
    rows = field(args, fields.NORM_ROWS)
    dim = field(args, fields.NORM_DIM)
    chunks = dim // LANES
    weight = field(args, fields.NORM_WEIGHT)
    epsilon = load_element(float32_tag, args + 8 * fields.NORM_EPSILON)
    while True:
        begin = claim_task(args) * fields.NORM_TASK_ROWS
        if begin >= rows:
            return
        for row in range(begin, min(begin + fields.NORM_TASK_ROWS, rows)):
            x = field(args, fields.NORM_INPUT) + row * field(args, fields.NORM_INPUT_ROW)
            out = field(args, fields.NORM_OUT) + row * field(args, fields.NORM_OUT_ROW)
            squares = _sum_squares_around(tag, x, np.float32(0.0), chunks)
            scale = 1 / math.sqrt(squares / dim + epsilon)
            for chunk in range(chunks):
                at = chunk * LANES
                _scale_chunk(
                    tag,
                    x + at * item_bytes(tag),
                    weight + 4 * at,
                    scale,
                    out + at * item_bytes(tag),
                )


@njit
def layer_norm_tasks(args, tag):
    """out = (x - mean) / sqrt(variance + epsilon) * weight + bias for all rows."""
    rows = field(args, fields.NORM_ROWS)
    dim = field(args, fields.NORM_DIM)
    chunks = dim // LANES
    weight, bias = field(args, fields.NORM_WEIGHT), field(args, fields.NORM_BIAS)
    epsilon = load_element(float32_tag, args + 8 * fields.NORM_EPSILON)
    while True:
        begin = claim_task(args) * fields.NORM_TASK_ROWS
        if begin >= rows:
            return
        for row in range(begin, min(begin + fields.NORM_TASK_ROWS, rows)):
            x = field(args, fields.NORM_INPUT) + row * field(args, fields.NORM_INPUT_ROW)
            out = field(args, fields.NORM_OUT) + row * field(args, fields.NORM_OUT_ROW)
            mean = np.float32(_sum(tag, x, chunks) / dim)
            variance = _sum_squares_around(tag, x, mean, chunks) / dim
            scale = np.float32(1 / math.sqrt(variance + epsilon))
            for chunk in range(chunks):
                at = chunk * LANES
                element = at * item_bytes(tag)
                _shift_chunk(
                    tag, x + element, mean, scale, weight + 4 * at, bias + 4 * at, out + element
                )


def _sum_lanes(builder, tag, x, chunks, add):
    """``add(sums, elements)`` over chunks * 16 elements, lane by lane, then over the lanes."""

    def body(chunk, state):
        at = simd.offset(builder, x, chunk, simd.i64(LANES * size_of(tag)))
        return [add(state[0], simd.load_vector(builder, at, tag))]

    (sums,) = simd.loop(builder, chunks, [simd.vector(0.0)], body)
    return simd.reduce_add(builder, sums)


@intrinsic
def _sum(typingctx, tag, x, chunks):
    """Of chunks * 16 elements."""

    def codegen(context, builder, signature, args):
        return _sum_lanes(builder, signature.args[0], args[1], args[2], builder.fadd)

    return types.float32(tag, types.int64, types.int64), codegen


@intrinsic
def _sum_squares_around(typingctx, tag, x, mean, chunks):
    """Of the differences of chunks * 16 elements from their mean, or from zero."""

    def codegen(context, builder, signature, args):
        _, x, mean, chunks = args
        means = simd.splat(builder, mean)

        def add(sums, elements):
            difference = builder.fsub(elements, means)
            return simd.multiply_add(builder, difference, difference, sums)

        return _sum_lanes(builder, signature.args[0], x, chunks, add)

    return types.float32(tag, types.int64, types.float32, types.int64), codegen


@intrinsic
def _shift_chunk(typingctx, tag, x, mean, scale, weight, bias, out):
    """out = (x - mean) * scale * weight + bias for sixteen elements; weights are float32."""

    def codegen(context, builder, signature, args):
        _, x, mean, scale, weight, bias, out = args
        tag = signature.args[0]
        shifted = builder.fsub(simd.load_vector(builder, x, tag), simd.splat(builder, mean))
        shifted = builder.fmul(shifted, simd.splat(builder, scale))
        weights = simd.load(builder, weight, simd.VF32, 4)
        biases = simd.load(builder, bias, simd.VF32, 4)
        shifted = simd.multiply_add(builder, shifted, weights, biases)
        simd.store_vector(builder, shifted, out, tag)

    i64, f32 = types.int64, types.float32
    return types.void(tag, i64, f32, f32, i64, i64, i64), codegen


@intrinsic
def _scale_chunk(typingctx, tag, x, weight, scale, out):
    """out = x * scale * weight for sixteen elements; weight is float32."""

    def codegen(context, builder, signature, args):
        _, x, weight, scale, out = args
        tag = signature.args[0]
        scaled = builder.fmul(simd.load_vector(builder, x, tag), simd.splat(builder, scale))
        scaled = builder.fmul(scaled, simd.load(builder, weight, simd.VF32, 4))
        simd.store_vector(builder, scaled, out, tag)

    i64 = types.int64
    return types.void(tag, i64, i64, types.float32, i64), codegen


@cache
def norm_kernel(dtype: torch.dtype) -> Kernel:
    """RMS normalization of elements of a type.

    Raises:
        ValueError: no kernel serves the type.
    """
    return compile_kernel(norm_tasks, fields.NORM_LAYOUT, element_tag(dtype))


@cache
def layer_norm_kernel(dtype: torch.dtype) -> Kernel:
    """Normalization by mean and variance of elements of a type.

    Raises:
        ValueError: no kernel serves the type.
    """
    return compile_kernel(layer_norm_tasks, fields.NORM_LAYOUT, element_tag(dtype))
