"""What sampling computes on CPUs, by compiled kernels. ``sampling.kernels`` imports it there."""

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.batch.rows import Indices
from gpu_worker.grammar.grammars import Masks
from gpu_worker.sampling import cpu_argmax, cpu_bans, cpu_penalties
from kernels.cpu.sampling import sampler


class CpuSampling:
    """The compiled kernels that choose tokens from logits in main memory."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def warm_up(self) -> None:
        """Compile now, or load from numba's cache, so that the first step need not wait."""
        cpu_argmax.warm_up()
        cpu_bans.warm_up()
        sampler.load()
        cpu_penalties.warm_up()

    def argmax(
        self,
        logits: torch.Tensor,  # [R, V] bfloat16
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The maximum of each row [R] and its first token [R]; a NaN counts as the maximum."""
        found, values = cpu_argmax.argmax(logits.view(torch.uint16).numpy())
        return torch.from_numpy(values), torch.from_numpy(found)

    def ban(
        self,
        logits: torch.Tensor,  # [R, V], changed in place
        rows: Indices,  # [n]
        masks: Masks,  # [n, V / 32]
    ) -> None:
        """Set the logits of these rows to -inf where the bit of a token is 0."""
        cpu_bans.ban(logits, rows, masks)

    def penalize(
        self,
        logits: torch.Tensor,  # [R, V] float32, changed in place
        places: torch.Tensor,  # [P] int64 rows of the logits
        counts: torch.Tensor,  # [C, V] int32, see ``Penalties``
        rows: torch.Tensor,  # [P] int64 rows of the counts
        penalties: torch.Tensor,  # [P, 3, 1] float32: repetition, frequency, presence
    ) -> None:
        """Change the logits of tokens in the prompt or the output."""
        arrays = (each.numpy() for each in (logits, places, counts, rows, penalties))
        cpu_penalties.penalize(*arrays)

    def sample(
        self,
        logits: torch.Tensor,  # [R, V]
        random_rows: npt.NDArray[np.intp],  # [N]
        parameters: Mapping[str, npt.NDArray[Any]],  # [N] each
        keys: npt.NDArray[np.int32],  # [2, N]
        tokens: torch.Tensor,  # [R], those of the N random rows are replaced
    ) -> None:
        """Sample the tokens of rows with a temperature."""
        if logits.dtype not in (torch.float32, torch.bfloat16) or logits.stride(1) != 1:
            logits = logits.float().contiguous()
        self._sampler().sample(logits, random_rows, parameters, keys, tokens.numpy())

    def _sampler(self) -> sampler.CpuSampler:
        """The calling thread's sampler: its memory serves one call at a time."""
        try:
            found: sampler.CpuSampler = self._of_thread.sampler
        except AttributeError:
            found = self._of_thread.sampler = sampler.CpuSampler()
        return found
