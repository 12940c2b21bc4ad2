"""Selects the attention backend and the block mover of a device."""

from collections.abc import Sequence

import torch

from kernels.interface import AttentionBackend, BlockMover, LayerCache


def select_backend(
    name: str | None,
    device_type: str,
    dtype: torch.dtype,
    deterministic: bool = False,
) -> AttentionBackend:
    """The backend of this name; for None or "auto", the fastest that fits the device.

    A deterministic one gives a row the same result, bit for bit, in every batch; on CPUs also
    however many rows of its sequence are computed with it.

    Backends are imported only when they are selected: an installation for CPUs has no Triton, and
    the reference needs no numba.

    Raises:
        ValueError: if the name is unknown or the backend cannot serve the device or the type.
    """
    if name is None or name == "auto":
        name = {"cuda": "triton", "cpu": "cpu"}.get(device_type)
        if name is None:
            raise ValueError(f"no attention backend for device type {device_type!r}")
    if name == "reference":
        from kernels.reference import ReferenceBackend

        return ReferenceBackend()
    if name == "sdpa":
        from kernels.sdpa import SdpaBackend

        return SdpaBackend()
    if name == "cpu":
        _require(device_type == "cpu", name, device_type)
        from kernels.cpu.attention.backend import CpuBackend

        _require(dtype in CpuBackend.dtypes, name, dtype)
        return CpuBackend(deterministic=deterministic)
    if name == "triton":
        # Triton runs on CPU tensors too, in its interpreter, which is for tests.
        from kernels.triton.backend import TritonBackend
        from kernels.triton.tiles import interpreting

        _require(device_type == "cuda" or interpreting(), name, device_type)
        _require(dtype in TritonBackend.dtypes, name, dtype)
        return TritonBackend(fixed_cut=deterministic)
    raise ValueError(f"unknown attention backend {name!r}: auto, reference, cpu, triton or sdpa")


def select_mover(layers: Sequence[LayerCache]) -> BlockMover:
    """The fastest mover of blocks for the device that the layers of a pool lie on."""
    device_type = layers[0].key.device.type
    if device_type == "cuda":
        from kernels.triton.block_mover import TritonMover

        return TritonMover(layers)
    if device_type == "cpu":
        from kernels.cpu.blocks.block_mover import CpuMover

        return CpuMover(layers)
    from kernels.reference_block_mover import ReferenceMover

    return ReferenceMover(layers)


def _require(fits: bool, name: str, what: object) -> None:
    if not fits:
        raise ValueError(f"attention backend {name!r} does not serve {what}")
