"""The last sampled token of each sequence, on the device, where the next step reads it."""

import torch


class LastTokens:
    """Last tokens by batch slot, on the device: no step waits for their copy to the host.

    Args:
        device: where steps compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._tokens = torch.zeros(0, dtype=torch.int64, device=device)

    def hold(self, num_slots: int) -> None:
        """Grow to so many slots; existing tokens are kept."""
        if num_slots > self._tokens.shape[0]:
            more = self._tokens.new_zeros(num_slots - self._tokens.shape[0])
            self._tokens = torch.cat([self._tokens, more])

    def read(
        self,
        slots: torch.Tensor,  # [n] int64
        out: torch.Tensor,  # [n] int64
    ) -> None:
        """Gather the tokens of these slots into ``out``."""
        torch.index_select(self._tokens, 0, slots, out=out)

    def write(
        self,
        slots: torch.Tensor,  # [n] int64, all different
        tokens: torch.Tensor,  # [n] int64
    ) -> None:
        """Store the tokens that these slots have sampled."""
        self._tokens.index_copy_(0, slots, tokens)
