"""Quantized weights in LLVM IR: their tags, scales and codes (see simd for why and how).

A *weight tag* is a tuple here. Its types stand for codes (uint8: four bits; int8: eight), for
scales (float32, or float16: uint16 where one instruction widens it, else int16), for minimums
(uint8: there are some; int8: none) and for inputs rounded to eight bits (uint8: with a scale for
each row; uint16: for each group; int8: not rounded).
"""

from typing import NamedTuple

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from kernels.cpu.linear.linear_arguments import GROUP, GROUP_OUTPUTS
from kernels.cpu.linear.linear_ir import prefetch_lines
from kernels.cpu.quantized.packed_format import STEP_INPUTS
from kernels.cpu.runtime import simd
from kernels.cpu.runtime.prefetch import Cache, read_once_cache
from kernels.cpu.runtime.simd import LANES

four_bit_tag, eight_bit_tag = np.uint8(0), np.int8(0)
half_tag, emulated_half_tag = np.uint16(0), np.int16(0)
minimums_tag, no_minimums_tag = np.uint8(0), np.int8(0)
rounded_rows_tag, rounded_groups_tag, unrounded_tag = np.uint8(0), np.uint16(0), np.int8(0)

# The distance of prefetches from reads.
_SOON_BYTES = 48 * 64

_VHALF = ir.VectorType(ir.HalfType(), LANES)


class Tags(NamedTuple):
    """The types in a weight tag."""

    codes: types.Type
    scales: types.Type
    minimums: types.Type
    inputs: types.Type

    @property
    def four_bits(self):
        """Whether codes have four bits."""
        return self.codes == types.uint8

    @property
    def has_minimums(self):
        """Whether there are minimums."""
        return self.minimums == types.uint8

    @property
    def rounds_inputs(self):
        """Whether inputs are rounded to eight bits."""
        return self.inputs != types.int8

    @property
    def rounds_rows(self):
        """Whether those of a row have one scale."""
        return self.inputs == types.uint8

    @property
    def zero_point(self):
        """Of unsigned codes."""
        return 8 if self.four_bits else 128

    @property
    def scale_bytes(self):
        """Of a scale."""
        return 4 if self.scales == types.float32 else 2

    @property
    def header_bytes(self):
        """Of the scales and minimums of a group of inputs."""
        each = GROUP_OUTPUTS * self.scale_bytes
        return 2 * each if self.has_minimums else each

    @property
    def step_bytes(self):
        """Of a panel's codes of eight inputs."""
        return STEP_INPUTS * LANES // (2 if self.four_bits else 1)


class Header(NamedTuple):
    """Scales and minimums of a panel; None: all minimums are zero."""

    scales: ir.Value
    minimums: ir.Value | None


def load_header(builder, tags, header, panel):
    """Of the panel with an index, by the address of a group of inputs."""
    each = LANES * tags.scale_bytes
    at = simd.offset(builder, header, panel, simd.i64(each))
    scales = _load_numbers(builder, tags.scales, at)
    if not tags.has_minimums:
        return Header(scales, None)
    at = builder.add(at, simd.i64(GROUP * each))
    return Header(scales, _load_numbers(builder, tags.scales, at))


class InputGroups:
    """The groups of inputs of some panels, as a kernel's loops pass over them.

    Args:
        w: address of the first group.
        panels: indices of the panels.
        count: of groups.
        steps: of eight inputs in each.
    """

    def __init__(self, builder, tags, w, panels, count, steps):
        self.tags, self.panels, self.count = tags, panels, count
        self._builder, self._w, self._steps = builder, w, steps
        self._step_bytes = simd.i64(GROUP * tags.step_bytes)
        codes = builder.mul(steps, self._step_bytes)
        self._group_bytes = builder.add(simd.i64(tags.header_bytes), codes)

    def first_step(self, group):
        """The number of steps before a group."""
        return self._builder.mul(group, self._steps)

    def headers(self, group):
        """Scales and minimums of each panel."""
        at = simd.offset(self._builder, self._w, group, self._group_bytes)
        return [load_header(self._builder, self.tags, at, panel) for panel in self.panels]

    def loop(self, group, initial, body):
        """``sums = body(step, addresses of codes, sums)`` for each step; what is behind is
        prefetched.
        """
        builder, panel_bytes = self._builder, simd.i64(self.tags.step_bytes)
        header_at = simd.offset(builder, self._w, group, self._group_bytes)
        _prefetch_soon(builder, header_at, self.tags.header_bytes, len(self.panels))
        codes = builder.add(header_at, simd.i64(self.tags.header_bytes))

        def of_step(step, sums):
            at = simd.offset(builder, codes, step, self._step_bytes)
            _prefetch_soon(builder, at, self._step_bytes.constant, len(self.panels))
            places = [simd.offset(builder, at, panel, panel_bytes) for panel in self.panels]
            return body(step, places, sums)

        return simd.loop(builder, self._steps, initial, of_step)


def _prefetch_soon(builder, address, num_bytes, num_panels):
    """A group of outputs is one piece of memory: behind all of it, all of it is prefetched.

    If only some panels are read now, the others will be when it is read again, from a larger cache.
    """
    soon = builder.add(address, simd.i64(_SOON_BYTES))
    cache = read_once_cache() if num_panels == GROUP else Cache.L2
    prefetch_lines(builder, [soon], num_bytes, cache)


def _load_numbers(builder, tag, at):
    """Sixteen scales or minimums as float32."""
    if tag == types.float32:
        return simd.load(builder, at, simd.VF32, 4)
    if tag == types.uint16:
        return builder.fpext(simd.load(builder, at, _VHALF, 2), simd.VF32)
    bits = builder.zext(simd.load(builder, at, simd.VI16, 2), simd.VI32)
    sign = builder.shl(builder.and_(bits, simd.repeated(0x8000)), simd.repeated(16))
    size = builder.shl(builder.and_(bits, simd.repeated(0x7FFF)), simd.repeated(13))
    # The exponents' biases differ by 112; this holds below the normal range as well.
    size = builder.fmul(builder.bitcast(size, simd.VF32), simd.vector(2.0**112))
    return builder.bitcast(builder.or_(builder.bitcast(size, simd.VI32), sign), simd.VF32)
