"""The baselines of the worker: transformers' own ways to generate, with the same weights."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)

from shared.codec import IntArray
from shared.errors import PageStreamError

# Tokens in a block of continuous batching's cache, transformers' default.
_PAGE_TOKENS = 256
_ATTENTION = "sdpa"
_POLL_S = 1.0
_LOGGER = "ContinuousBatchingLogger"  # of transformers; it logs much at every start


class BaselineFailed(PageStreamError):
    """A baseline returned no answer, or not the requested one."""


@dataclass(frozen=True, slots=True)
class BaselineRun:
    """The result of one run of a baseline.

    Attributes:
        how: the attention and other choices that it made.
        outputs: tokens of each prompt.
        decode_s: times of steps in which all sequences decode.
        whole_s: from the prompts to the last token.
    """

    how: str
    outputs: tuple[tuple[int, ...], ...]
    decode_s: tuple[float, ...]
    whole_s: float


class _StepTimes(StoppingCriteria):  # type: ignore[misc]
    """Records when each step of ``generate`` has ended; never stops it."""

    def __init__(self, device: torch.device) -> None:
        self.ended_s: list[float] = []
        self._device = device

    def __call__(self, input_ids: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
        _finish(self._device)
        self.ended_s.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class Transformers:
    """A model run by transformers.

    Args:
        folder: of the model.
        dtype: of weights and KV cache.
        max_num_batched_tokens: of a step of continuous batching.
    """

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, max_num_batched_tokens: int
    ) -> None:
        self._device = device
        self._max_num_batched_tokens = max_num_batched_tokens
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=_ATTENTION
        )
        logging.getLogger(_LOGGER).setLevel(logging.ERROR)
        self._model = model.to(device).eval().requires_grad_(False)

    def generate(self, prompts: Sequence[IntArray], num_new: int) -> BaselineRun:
        """Run ``generate`` on a batch of equally long prompts, greedily, with its default cache."""
        self._restore_attention()
        times = _StepTimes(self._device)
        config = GenerationConfig(max_new_tokens=num_new, do_sample=False, use_cache=True)
        began_s = time.perf_counter()
        token_ids = torch.tensor([prompt.tolist() for prompt in prompts], device=self._device)
        with torch.inference_mode():
            found = self._model.generate(
                token_ids,
                attention_mask=torch.ones_like(token_ids),
                generation_config=config,
                stopping_criteria=StoppingCriteriaList([times]),
            )
        outputs = found[:, token_ids.shape[1] :].tolist()
        whole_s = time.perf_counter() - began_s
        return BaselineRun(
            how=f"{self._model.config._attn_implementation}, dynamic cache",
            outputs=tuple(map(tuple, outputs)),
            decode_s=tuple(end - start for start, end in pairwise(times.ended_s)),
            whole_s=whole_s,
        )

    def continuous(
        self, prompts: Sequence[IntArray], num_new: int, use_graphs: bool | None = None
    ) -> BaselineRun:
        """Run continuous batching over transformers' own paged cache, greedily.

        Args:
            use_graphs: CUDA graphs; None: transformers' default.

        Raises:
            BaselineFailed: it ended without all answers.
        """
        self._restore_attention()
        longest = max(map(len, prompts)) + num_new
        pages = len(prompts) * (-(-longest // _PAGE_TOKENS) + 1)
        cache = ContinuousBatchingConfig(
            num_blocks=pages,
            max_batch_tokens=self._max_num_batched_tokens,
            use_cuda_graph=use_graphs,
        )
        # None, and not -1, would only be a warning.
        config = GenerationConfig(max_new_tokens=num_new, do_sample=False, eos_token_id=-1)
        inputs = [prompt.tolist() for prompt in prompts]
        with self._model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=cache
        ) as manager:
            chosen = manager.continuous_batching_config
            how = ", ".join(
                [
                    f"{self._model.config._attn_implementation}",
                    f"CUDA graphs {'on' if any(chosen.cuda_graph_booleans) else 'off'}",
                    f"async {'on' if chosen.use_async_batching else 'off'}",
                ]
            )
            began_s = time.perf_counter()
            ids = manager.add_requests(inputs, max_new_tokens=num_new, record_timestamps=True)
            answers: dict[str, Any] = {}
            while len(answers) < len(ids):
                answer = manager.get_result(timeout=_POLL_S)
                if answer is not None and answer.is_finished():
                    if answer.error:
                        raise BaselineFailed(f"continuous batching: {answer.error}")
                    answers[answer.request_id] = answer
                elif answer is None and not manager.is_running():
                    raise BaselineFailed("continuous batching ended without all answers")
            whole_s = time.perf_counter() - began_s
        ordered = [answers[name] for name in ids]
        return BaselineRun(
            how=how,
            outputs=tuple(tuple(answer.generated_tokens) for answer in ordered),
            decode_s=steps_together([answer.timestamps for answer in ordered]),
            whole_s=whole_s,
        )

    def _restore_attention(self) -> None:
        """Restore the attention that continuous batching leaves changed if it fails early."""
        self._model.set_attn_implementation(_ATTENTION)


def steps_together(moments_s: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Seconds between tokens of one sequence, while all of them decode.

    Args:
        moments_s: when each sequence got each of its tokens.
    """
    first_s = max(moments[0] for moments in moments_s)
    last_s = min(moments[-1] for moments in moments_s)
    latest = max(moments_s, key=lambda moments: moments[0])
    return tuple(
        end - start for start, end in pairwise(latest) if first_s <= start and end <= last_s
    )


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
