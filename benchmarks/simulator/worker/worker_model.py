"""Estimates the duration of an iteration from its work: a roofline with fixed costs.

One pass of the model reads all weights once and multiplies each token with them; the slower of the
two counts. Attention is added: for decodes by the bandwidth for keys and values, for prompts by the
arithmetic. The efficiencies are the same for all models, devices and systems; docs/SIMULATOR.md
gives their sources, and the single number that one of them was fitted to.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import log2
from typing import Protocol

from benchmarks.simulator.system import Work
from benchmarks.simulator.worker.all_reduce import AllReduce
from benchmarks.simulator.worker.hardware import Gpu
from benchmarks.simulator.worker.model_shapes import BYTES_PER_VALUE, Model
from shared.errors import SettingsError

# The PagedAttention paper, Table 1: token slots of its configurations.
_PUBLISHED_SLOTS = {
    ("OPT-13B", "A100-40G", 1): 15_700,
    ("OPT-66B", "A100-40G", 4): 9_700,
    ("OPT-175B", "A100-80G", 8): 60_100,
}
_USABLE_MEMORY = 0.9  # of a device; the rest is for activations, the driver and fragments


@dataclass(frozen=True, slots=True)
class Sums:
    """How a tensor parallel group adds the partial outputs of its layers.

    Attributes:
        all_reduce: of one sum; a layer has two.
        value_bytes: of a partial output.
        copies_vocabulary: whether embeddings and output layer are on each device, not divided.
    """

    all_reduce: AllReduce
    value_bytes: int = BYTES_PER_VALUE
    copies_vocabulary: bool = False


@dataclass(frozen=True, slots=True)
class Calibration:
    """Efficiencies of real kernels relative to the data sheet, and fixed costs.

    The defaults are those of the PagedAttention paper's system.

    Attributes:
        flops_share: of the peak that matrix products reach.
        attention_flops_share: the same for attention over a prompt.
        memory_share: of the peak bandwidth with which weights, keys and values are read.
        host_share: of the peak bandwidth of transfers to and from the host.
        peer_share: of the peak bandwidth of reductions over a tensor parallel group.
        pass_s: of each pass of the model: scheduling, launching kernels, moving its inputs.
        row_s: of each row whose next token is sampled.
        reduction_s: of each reduction over a tensor parallel group, per doubling of the group.
        transfer_s: of each transfer between device and host.
        page_s: of mapping or unmapping a page.
    """

    flops_share: float = 0.6
    attention_flops_share: float = 0.4
    memory_share: float = 0.8
    host_share: float = 0.8
    peer_share: float = 0.6
    pass_s: float = 0.008
    row_s: float = 0.00027
    reduction_s: float = 0.00001
    transfer_s: float = 0.000005
    page_s: float = 0.00004

    def sums(self, gpu: Gpu, num_gpus: int) -> "Sums":
        """The sums over a tensor parallel group of these devices."""
        # A ring sends each value twice, except the part that stays.
        sent = 2 * (num_gpus - 1) / num_gpus
        byte_s = sent / (gpu.peer_bytes_per_s * self.peer_share)
        return Sums(AllReduce(self.reduction_s * log2(num_gpus), byte_s))


PAPER_2023, MODERN = "paper-2023", "modern"
CALIBRATIONS: Mapping[str, Calibration] = {
    PAPER_2023: Calibration(),
    # Estimates: steps run from CUDA graphs, and the device samples for all rows at once.
    MODERN: Calibration(pass_s=0.002, row_s=0.00001),
}


def find_calibration(name: str) -> Calibration:
    """The calibration of this name.

    Raises:
        SettingsError: there is none.
    """
    if name not in CALIBRATIONS:
        raise SettingsError("--calibration", name, f"known are {', '.join(CALIBRATIONS)}")
    return CALIBRATIONS[name]


class Limit(StrEnum):
    """The bottleneck of a part of an iteration."""

    COMPUTE = "compute"
    MEMORY_BANDWIDTH = "memory bandwidth"
    FIXED_COSTS = "fixed costs"


@dataclass(slots=True)
class Parts:
    """The parts of an iteration's time, in seconds."""

    compute_s: float
    memory_s: float
    fixed_s: float

    def __init__(self, compute_s: float = 0.0, memory_s: float = 0.0, fixed_s: float = 0.0) -> None:
        self.compute_s = compute_s
        self.memory_s = memory_s
        self.fixed_s = fixed_s


class Worker(Protocol):
    """The worker model, as the clock and the scheduler use it."""

    model: Model

    @property
    def kv_slots(self) -> int:
        """Tokens whose keys and values fit."""

    def parts(self, work: Work) -> Parts:
        """The duration of an iteration, by bottleneck."""

    def swap_copies(self, num_blocks: int) -> int:
        """Transfers that move so many blocks."""

    def recompute_us_per_token(self) -> float:
        """The cost of recomputing a token."""

    def swap_us_per_block(self, block_size: int) -> float:
        """The cost of moving a block, one way."""


class WorkerModel:
    """A model on one device, or on a tensor parallel group of equal devices.

    Args:
        model: to compute.
        gpu: to compute on.
        num_gpus: degree of tensor parallelism.
        calibration: for what is not in data sheets.
        mixes_passes: whether prompts and decodes of an iteration share one pass of the model. If
            not, as in the PagedAttention paper's system, each pass reads the weights.
        sums: of partial outputs over the group; None: by the calibration.
    """

    def __init__(
        self,
        model: Model,
        gpu: Gpu,
        num_gpus: int = 1,
        calibration: Calibration | None = None,
        mixes_passes: bool = True,
        sums: "Sums | None" = None,
    ) -> None:
        if num_gpus < 1 or model.num_kv_heads % num_gpus:
            raise ValueError(
                f"num_gpus={num_gpus}: {model.name} has {model.num_kv_heads} KV heads, which "
                "must be shared evenly"
            )
        if calibration is None:
            calibration = Calibration()
        self.model = model
        self.gpu = gpu
        self.num_gpus = num_gpus
        self.calibration = calibration
        self.mixes_passes = mixes_passes
        if sums is None:
            sums = calibration.sums(gpu, num_gpus)
        self.sums = sums
        flops = gpu.flops * num_gpus * calibration.flops_share
        bandwidth = gpu.memory_bytes_per_s * num_gpus * calibration.memory_share
        # Each GPU reads the whole output layer and computes all logits, if it is on all of them.
        vocab_weights = model.vocab_weights * (num_gpus if sums.copies_vocabulary else 1)
        read = BYTES_PER_VALUE * (model.layer_weights + vocab_weights)
        self._weights_s = read / bandwidth
        self._token_s = 2 * model.layer_weights / flops
        self._logits_s = 2 * vocab_weights / flops
        self._kv_token_s = model.kv_bytes_per_token / bandwidth
        # Scores and their sums: two products, of two operations per value of every query head.
        pairs = 4 * model.num_layers * model.num_heads * model.head_dim
        self._pair_s = pairs / (gpu.flops * num_gpus * calibration.attention_flops_share)
        self._pass_s, self._peer_token_s = calibration.pass_s, 0.0
        if num_gpus > 1:
            num_sums = 2 * model.num_layers
            self._pass_s += num_sums * sums.all_reduce.latency_s
            token_bytes = sums.value_bytes * model.hidden_size
            self._peer_token_s = num_sums * token_bytes * sums.all_reduce.byte_s
        self._row_s = calibration.row_s
        self._host_byte_s = 1 / (gpu.host_bytes_per_s * num_gpus * calibration.host_share)
        self._copy_byte_s = 2 / bandwidth  # read and written

    def seconds(self, work: Work) -> float:
        """The duration of an iteration."""
        parts = self.parts(work)
        return parts.compute_s + parts.memory_s + parts.fixed_s

    def parts(self, work: Work) -> Parts:
        """The duration by bottleneck; of a pass's reading and computing the slower one counts."""
        prefill, decode, rows = work.prefill_tokens, work.decode_tokens, work.sampled_rows
        parts = Parts(
            work.prefill_context * self._pair_s, work.decode_context * self._kv_token_s, 0.0
        )
        if prefill and decode and not self.mixes_passes:
            first = max(rows - decode, 0)
            self._add_pass(parts, prefill, first)
            self._add_pass(parts, decode, rows - first)
        else:
            self._add_pass(parts, prefill + decode, rows)
        parts.fixed_s += rows * self._row_s
        parts.fixed_s += (prefill + decode) * self._peer_token_s
        parts.memory_s += work.copied_bytes * self._copy_byte_s
        if work.swapped_bytes or work.mapped_pages:
            parts.fixed_s += self._moved_s(work)
        return parts

    def _add_pass(self, parts: Parts, tokens: int, sampled: int) -> None:
        if tokens == 0 and sampled == 0:
            return
        parts.fixed_s += self._pass_s
        multiplied = tokens * self._token_s + sampled * self._logits_s
        if multiplied > self._weights_s:
            parts.compute_s += multiplied
        else:
            parts.memory_s += self._weights_s

    def _moved_s(self, work: Work) -> float:
        found = work.swapped_bytes * self._host_byte_s
        found += work.swap_copies * self.calibration.transfer_s
        return found + work.mapped_pages * self.calibration.page_s

    # ------------------------------------------------------------- for systems

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights on all devices together."""
        copies = self.num_gpus - 1 if self.sums.copies_vocabulary else 0
        return self.model.weight_bytes + copies * self.model.embedding_bytes

    @property
    def kv_slots(self) -> int:
        """Tokens whose keys and values fit beside the weights.

        They are those of the PagedAttention paper's configurations (Table 1), otherwise computed.

        Raises:
            ValueError: not even the weights fit.
        """
        published = _PUBLISHED_SLOTS.get((self.model.name, self.gpu.name, self.num_gpus))
        if published is not None:
            return published
        usable = _USABLE_MEMORY * self.gpu.memory_bytes * self.num_gpus
        left = usable - self.weight_bytes
        if left < self.model.kv_bytes_per_token:
            raise ValueError(
                f"{self.model.name} has {self.weight_bytes:,} bytes of weights, "
                f"{self.num_gpus} x {self.gpu.name} have {int(usable):,} to use"
            )
        return int(left // self.model.kv_bytes_per_token)

    def swap_copies(self, num_blocks: int) -> int:
        """Transfers that move so many blocks: keys and values of each layer lie apart."""
        return 2 * self.model.num_layers * num_blocks

    def recompute_us_per_token(self, num_tokens: int = 512) -> float:
        """The cost of recomputing a token in a prompt of this length."""
        work = Work(prefill_tokens=num_tokens, prefill_context=num_tokens**2 // 2)
        return 1e6 * self.seconds(work) / num_tokens

    def swap_us_per_block(self, block_size: int) -> float:
        """The cost of moving a block, one way."""
        moved = Work(
            swapped_bytes=block_size * self.model.kv_bytes_per_token,
            swap_copies=self.swap_copies(1),
        )
        return 1e6 * self._moved_s(moved)

    def with_calibration(self, **changed: float) -> "WorkerModel":
        """The same worker with other numbers in its calibration."""
        return WorkerModel(
            self.model,
            self.gpu,
            self.num_gpus,
            replace(self.calibration, **changed),
            self.mixes_passes,
        )
