"""Parameters of a step's rows on a GPU, where one kernel chooses all tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.batch.sequence_arrays import Slots


@dataclass(frozen=True, slots=True)
class DeviceSampling:
    """Parameters of the N rows of R that are sampled; the others get their argmax."""

    places: torch.Tensor  # [R] int32, of the row's parameters; negative: the argmax
    temperature: torch.Tensor  # [N] float32
    top_k: torch.Tensor  # [N] int64, 0 keeps all
    top_p: torch.Tensor  # [N] float32, 1 keeps all
    log_min_p: torch.Tensor  # [N] float32, -inf keeps all

    @staticmethod
    def of(
        num_rows: int,  # R
        random_rows: Slots,  # [N]
        parameters: Mapping[str, npt.NDArray[Any]],  # [N] each, by name
        device: torch.device,
    ) -> "DeviceSampling":
        """Rows and their parameters on a device."""

        def copied(numbers: npt.NDArray[Any]) -> torch.Tensor:
            return torch.from_numpy(numbers).to(device, non_blocking=True)

        places = np.full(num_rows, -1, np.int32)
        places[random_rows] = np.arange(len(random_rows), dtype=np.int32)
        with np.errstate(divide="ignore"):  # 0 keeps all
            log_min_p = np.log(parameters["min_p"])
        return DeviceSampling(
            places=copied(places),
            temperature=copied(parameters["temperature"]),
            top_k=copied(parameters["top_k"]),
            top_p=copied(parameters["top_p"]),
            log_min_p=copied(log_min_p),
        )

    def choose(
        self,
        logits: torch.Tensor,  # [R, V]
        keys: torch.Tensor,  # [2, N] int32 of the Gumbel noise
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [R] int64, and which rows are broken, [R] bool; without waiting."""
        from kernels.triton.sampling import sampler  # an installation for CPUs has no Triton

        return sampler.sample(
            logits, self.places, self.temperature, self.top_k, self.top_p, self.log_min_p, keys
        )
