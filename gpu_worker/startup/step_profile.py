"""Runs the largest step before the pool is allocated, to measure its memory."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from gpu_worker.kv.allocation import Allocator
from gpu_worker.model.ragged_model import LayerShape, RaggedModel
from gpu_worker.sampling.device_sampling import DeviceSampling
from gpu_worker.sampling.penalties import PenalizedRows, Penalties
from gpu_worker.sampling.sampler import RowSampling, choose, gumbel_keys
from gpu_worker.startup.gpu_budget import StepMemory
from gpu_worker.step.buckets import Bucket, Buckets
from gpu_worker.step.input_buffers import StepBuffers
from gpu_worker.step.inputs import InputWriter, bucket_size
from gpu_worker.step.model_runner import EagerRunner
from kernels.interface import AttentionBackend
from shared.errors import SettingsError
from shared.sampling import PARAMETERS, Effect

# Of one graph, besides the memory that all of them share.
_GRAPH_BYTES = 4 * 2**20


class StepProfile:
    """Runs steps of padding alone, which cost as much as real ones and need no pool.

    Args:
        model: a model that passed the check at load.
        shapes: its attention layers.
        backend: attention kernels for the model's device and type.
        allocator: allocates a memory of one block.
        max_model_len: longest sequence in tokens.
    """

    def __init__(
        self,
        model: RaggedModel,
        shapes: Sequence[LayerShape],
        backend: AttentionBackend,
        allocator: Allocator,
        max_model_len: int,
    ) -> None:
        self._memory = allocator.allocate(shapes, 1)
        self._runner = EagerRunner(model, self._memory, backend)
        self._device = model.device
        self._max_model_len = max_model_len
        self.vocab_size = model.vocab_size

    def compute(self, bucket: Bucket) -> torch.Tensor:
        """The logits of a step of this size."""
        buffers = StepBuffers(self._device, bucket_size(bucket), 1)
        writer = InputWriter(buffers, None, self._max_model_len)
        with torch.inference_mode():
            return self._runner.run(writer.padding(bucket))

    def close(self) -> None:
        """Release the memory of one block."""
        self._memory.close()


def sample_all(logits: torch.Tensor, penalties: Penalties) -> None:
    """Sample a token for each row [S, V] with penalties and filters.

    Args:
        logits: of the rows; not changed.
        penalties: for as many sequences.
    """
    num_rows, device = len(logits), logits.device
    rows = np.arange(num_rows)
    zeros = np.zeros(num_rows, np.int64)
    values = {"temperature": 1.0, "top_p": 0.9}
    parameters = {
        name: np.full(num_rows, values.get(name, parameter.neutral), parameter.column)
        for name, parameter in PARAMETERS.items()
        if parameter.effect is Effect.SAMPLE
    }
    places = torch.from_numpy(rows).to(device)
    neutral = torch.ones((num_rows, 3, 1), device=device)
    penalized = PenalizedRows(penalties, places, places, neutral, None)
    on_device = None
    if device.type != "cpu":
        on_device = DeviceSampling.of(num_rows, rows, parameters, device)
    sampling = RowSampling(
        random_rows=rows,
        seeds=np.zeros(num_rows, np.uint64),
        choices=zeros,
        parameters=parameters,
        on_device=on_device,
        has_min_tokens=False,
        logprob_rows=np.empty(0, np.int64),
        penalized=penalized,
    )
    keys = gumbel_keys(sampling, zeros)
    with torch.inference_mode():
        wide = penalized.changed(torch.zeros_like(logits))
        chosen = choose(wide, sampling, keys, torch.from_numpy(keys).to(device))
        penalized.count(chosen.tokens)


def measure_steps(
    profile: StepProfile,
    max_num_batched_tokens: int,
    max_num_sequences: int,
    buckets: Buckets | None,
    device: torch.device,
) -> StepMemory:
    """Measure the GPU memory of steps.

    Args:
        profile: of the model.
        max_num_batched_tokens: of the largest step.
        max_num_sequences: of the largest step.
        buckets: sizes to capture graphs for; None: no graphs.
        device: the GPU.

    Raises:
        SettingsError: the largest step does not fit beside the weights.
    """
    num_seqs = min(max_num_sequences, max_num_batched_tokens)
    largest = Bucket(max_num_batched_tokens, num_seqs, False)

    def largest_step() -> None:
        penalties = Penalties(profile.vocab_size, max_num_sequences, device)
        penalties.allocate(max_num_sequences)  # their memory is kept between steps
        sample_all(profile.compute(largest), penalties)

    try:
        profile.compute(Bucket(1, 1, True))  # loads kernels, which later steps share
        activation_bytes = peak_bytes(largest_step, device)
        graph_bytes = 0
        if buckets is not None:
            sizes = list(buckets)
            logits: list[torch.Tensor] = []
            graph_bytes = peak_bytes(lambda: logits.append(profile.compute(sizes[0])), device)
            row_bytes = logits.pop()[0].nbytes
            graph_bytes += max_num_sequences * row_bytes + len(sizes) * _GRAPH_BYTES
    except torch.OutOfMemoryError as error:
        reason = "a step of so many tokens does not fit beside the weights; lower it"
        raise SettingsError("--max-num-batched-tokens", max_num_batched_tokens, reason) from error
    return StepMemory(activation_bytes, graph_bytes)


def peak_bytes(run: Callable[[], None], device: torch.device) -> int:
    """Peak of the bytes that the allocator takes from the GPU additionally during a call."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_reserved(device)) - held
