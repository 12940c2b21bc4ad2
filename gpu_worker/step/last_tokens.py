"""The token that each sequence sampled last, where the next step reads it."""

import torch


class LastTokens:
    """Tokens by slot, on the device: no step waits until the host knows what was sampled.

    Args:
        device: where steps compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._tokens = torch.zeros(0, dtype=torch.int64, device=device)

    def hold(self, num_slots: int) -> None:
        """Make room for so many slots; what is there stays."""
        if num_slots > self._tokens.shape[0]:
            more = self._tokens.new_zeros(num_slots - self._tokens.shape[0])
            self._tokens = torch.cat([self._tokens, more])

    def read(
        self,
        slots: torch.Tensor,  # [n] int64
        out: torch.Tensor,  # [n] int64
    ) -> None:
        """The tokens of these slots."""
        torch.index_select(self._tokens, 0, slots, out=out)

    def write(
        self,
        slots: torch.Tensor,  # [n] int64, all different
        tokens: torch.Tensor,  # [n] int64
    ) -> None:
        """These slots have sampled."""
        self._tokens.index_copy_(0, slots, tokens)
