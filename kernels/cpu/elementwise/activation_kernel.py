"""The CPU kernel of activations, with a factor (as in gated MLPs) or without."""

# ruff: noqa: ARG001 - numba calls an intrinsic with types to learn what to emit

import math
from functools import cache

import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic

from kernels.cpu.elementwise import elementwise_arguments as fields
from kernels.cpu.runtime import simd
from kernels.cpu.runtime.entry_points import Kernel, compile_kernel, element_tag
from kernels.cpu.runtime.memory import claim_task, field, item_bytes, load_element
from kernels.cpu.runtime.simd import LANES, float32_tag

# log(erfc(z) / t) + z^2 as a polynomial in t = 1 / (1 + z / 2), for z >= 0 to a relative error of
# 1.2e-7 in erfc (Press et al., Numerical Recipes, section 6.2); the constant first.
_LOG_ERFC = (
    -1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806,
    0.27886807, -1.13520398, 1.48851587, -0.82215223, 0.17087277,
)  # fmt: skip


@njit
def activate_tasks(args, tag):
    """out = f(x) or f(x) * factor for all elements, in float32, then rounded."""
    elements = field(args, fields.ACTIVATE_ELEMENTS)
    activation = field(args, fields.ACTIVATION)
    slope = load_element(float32_tag, args + 8 * fields.SLOPE)
    x, factor = field(args, fields.ACTIVATED), field(args, fields.FACTOR)
    out = field(args, fields.ACTIVATE_OUT)
    while True:
        at = claim_task(args) * fields.ACTIVATE_TASK_ELEMENTS
        if at >= elements:
            return
        stop = min(at + fields.ACTIVATE_TASK_ELEMENTS, elements)
        while at < stop:
            begin = at * item_bytes(tag)
            factor_at = 0 if factor == 0 else factor + begin
            if at + LANES <= stop:
                _activate(tag, 16, activation, slope, x + begin, factor_at, out + begin)
                at += LANES
            else:
                _activate(tag, 1, activation, slope, x + begin, factor_at, out + begin)
                at += 1


@intrinsic(prefer_literal=True)
def _activate(typingctx, tag, lanes, activation, slope, x, factor, out):
    """Sixteen elements, or one, which has the same bits as among sixteen."""
    is_vector = lanes.literal_value == LANES

    def codegen(context, builder, signature, args):
        _, _, activation, slope, x, factor, out = args
        tag = signature.args[0]

        def load(address):
            if is_vector:
                return simd.load_vector(builder, address, tag)
            return simd.splat(builder, simd.load_scalar(builder, address, tag))

        result = _choose(builder, activation, slope, load(x))
        result = builder.fmul(result, _factors(builder, factor, load))
        if is_vector:
            simd.store_vector(builder, result, out, tag)
        else:
            lane0 = builder.extract_element(result, ir.Constant(simd.I32, 0))
            simd.store_scalar(builder, lane0, out, tag)

    i64 = types.int64
    return types.void(tag, lanes, i64, types.float32, i64, i64, i64), codegen


def _factors(builder, address, load):
    """The vector at an address; ones if the address is zero."""
    before = builder.basic_block
    with builder.if_then(builder.icmp_signed("!=", address, simd.i64(0))):
        loaded = load(address)
        inside = builder.basic_block
    factors = builder.phi(simd.VF32)
    factors.add_incoming(simd.vector(1.0), before)
    factors.add_incoming(loaded, inside)
    return factors


def _choose(builder, activation, slope, x):
    """f(x) of the activation with this number."""
    after = builder.append_basic_block("activated")

    def scale(builder, x):
        return builder.fmul(x, simd.splat(builder, slope))

    functions = {
        fields.LINEAR: scale,
        fields.RELU: _relu,
        fields.GELU: _gelu,
        fields.GELU_TANH: _gelu_tanh,
    }
    results = []
    unknown = builder.append_basic_block("unknown")
    choice = builder.switch(activation, unknown)
    for number, function in functions.items():
        block = builder.append_basic_block()
        choice.add_case(simd.i64(number), block)
        builder.position_at_end(block)
        results.append((function(builder, x), builder.basic_block))
        builder.branch(after)
    builder.position_at_end(unknown)
    builder.unreachable()
    builder.position_at_end(after)
    found = builder.phi(simd.VF32)
    for result, block in results:
        found.add_incoming(result, block)
    return found


def _relu(builder, x):
    """max(x, 0); a NaN stays one."""
    zero = simd.vector(0.0)
    return builder.select(builder.fcmp_ordered("olt", x, zero), zero, x)


def _gelu(builder, x):
    """x * Phi(x), computed from Phi(-|x|), which is small, so that no digits cancel."""
    zero, one = simd.vector(0.0), simd.vector(1.0)
    negative = builder.fcmp_ordered("olt", x, zero)
    magnitude = builder.select(negative, builder.fneg(x), x)
    z = builder.fmul(magnitude, simd.vector(math.sqrt(0.5)))
    t = builder.fdiv(one, simd.multiply_add(builder, z, simd.vector(0.5), one))
    log_erfc = simd.vector(_LOG_ERFC[-1])
    for coefficient in reversed(_LOG_ERFC[:-1]):
        log_erfc = simd.multiply_add(builder, log_erfc, t, simd.vector(coefficient))
    log_erfc = builder.fsub(log_erfc, builder.fmul(z, z))
    power = _exp(builder, log_erfc)
    half = builder.fmul(builder.fmul(t, simd.vector(0.5)), power)
    return builder.fmul(x, builder.select(negative, half, builder.fsub(one, half)))


def _gelu_tanh(builder, x):
    """0.5 x (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3), that is x / (1 + exp(-2u))."""
    zero, one = simd.vector(0.0), simd.vector(1.0)
    square = builder.fmul(x, x)
    u = simd.multiply_add(builder, square, simd.vector(0.044715), one)
    u = builder.fmul(builder.fmul(u, x), simd.vector(2 * math.sqrt(2 / math.pi)))
    negative = builder.fcmp_ordered("olt", u, zero)
    # exp(-|2u|) never overflows.
    t = _exp(builder, builder.select(negative, u, builder.fneg(u)))
    numerator = builder.select(negative, builder.fmul(x, t), x)
    return builder.fdiv(numerator, builder.fadd(one, t))


def _exp(builder, x):
    """exp(x) for x <= 0, no less than 2**-125."""
    return simd.exp2(builder, builder.fmul(x, simd.vector(math.log2(math.e))))


@cache
def activate_kernel(dtype: torch.dtype) -> Kernel:
    """Activations of elements of a type.

    Raises:
        ValueError: no kernel serves the type.
    """
    return compile_kernel(activate_tasks, fields.ACTIVATION_LAYOUT, element_tag(dtype))
