"""GPUs, by their data sheets."""

from dataclasses import dataclass

from shared.errors import SettingsError

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device.

    Attributes:
        name: as users write it.
        memory_bytes: of the device.
        memory_bytes_per_s: between its memory and its processors.
        flops: dense, with 16-bit floats, per second.
        host_bytes_per_s: to and from the host's memory, one way, PCIe.
        peer_bytes_per_s: to and from the other devices of a group, one way, NVLink.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    flops: float
    host_bytes_per_s: float
    peer_bytes_per_s: float


GPUS = (
    Gpu("A100-40G", 40 * _GIB, 1.555e12, 312e12, 32e9, 300e9),
    Gpu("A100-80G", 80 * _GIB, 2.039e12, 312e12, 32e9, 300e9),
    Gpu("H100", 80 * _GIB, 3.35e12, 989e12, 64e9, 450e9),
    Gpu("H200", 141_000_000_000, 4.8e12, 989e12, 64e9, 450e9),
)


def find_gpu(name: str) -> Gpu:
    """The device of this name, in any capitalization.

    Raises:
        SettingsError: there is none.
    """
    for gpu in GPUS:
        if gpu.name.lower() == name.lower():
            return gpu
    known = ", ".join(gpu.name for gpu in GPUS)
    raise SettingsError("--gpu", name, f"known are {known}")
