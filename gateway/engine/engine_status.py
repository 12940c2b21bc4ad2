"""Whether an engine can take requests, and how many tokens fit into its KV pool."""

from dataclasses import dataclass, field

from shared.messages.leases import (
    EngineInfo,
    EngineState,
    KVGeometry,
    ModelInfo,
)


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that can take requests."""

    model: ModelInfo
    kv: KVGeometry
    max_num_sequences: int  # that run at once
    stalled_ms: int = field(default=0, compare=False)  # since its last step, while there is work

    @property
    def pool_tokens(self) -> int:
        """Tokens that the whole KV pool holds."""
        return self.kv.num_blocks * self.kv.block_size

    def blocks_needed(self, num_prompt: int, max_tokens: int, num_choices: int) -> int:
        """Blocks that a request can come to need.

        The choices share the full blocks of their prompt; the token that is drawn last is never
        computed and needs no slot.
        """
        shared = self._shared_blocks(num_prompt)
        each = -(-(num_prompt + max_tokens - 1) // self.kv.block_size)
        return shared + num_choices * (each - shared)

    def max_tokens_for(self, num_prompt: int, num_choices: int) -> int:
        """Tokens that each choice can generate at most; less than one if they do not fit at all."""
        shared = self._shared_blocks(num_prompt)
        own = (self.kv.num_blocks - shared) // num_choices
        fits_pool = (shared + own) * self.kv.block_size - num_prompt + 1
        return min(self.model.max_model_len - num_prompt, fits_pool)

    def _shared_blocks(self, num_prompt: int) -> int:
        # The block of the last prompt token is written by each choice for itself.
        return (num_prompt - 1) // self.kv.block_size


@dataclass(frozen=True, slots=True)
class EngineAway:
    """Why no request can be taken now.

    Attributes:
        is_final: what is open will not be finished either.
    """

    detail: str
    is_final: bool = False


def status_of(info: EngineInfo | None, engine_id: str, model_name: str) -> Engine | EngineAway:
    """Whether an engine can take requests for a model.

    Args:
        info: its lease; None if there is none.
    """
    if info is None:
        return EngineAway(f"no scheduler serves engine {engine_id!r}")
    if info.state != EngineState.READY or info.model is None or info.kv is None:
        detail = f"engine {engine_id!r} is {info.state}: {info.detail or 'no detail'}"
        return EngineAway(detail, is_final=info.state == EngineState.FAILED)
    if info.model.name != model_name:
        return EngineAway(
            f"engine {engine_id!r} serves {info.model.name!r}, this gateway {model_name!r}"
        )
    if info.draining:
        return EngineAway(f"engine {engine_id!r} finishes what it has, and takes nothing new")
    return Engine(info.model, info.kv, info.max_num_sequences, info.stalled_ms)
