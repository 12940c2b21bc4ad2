"""Follows the grammars of sequences, and computes which tokens each may choose next.

A mask follows from the grammar and the generated tokens alone. So a sequence that was preempted or
recovered, which is admitted again with its tokens, has the same masks as before.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLMatcher, LLTokenizer

from shared.codec import IntArray
from shared.logs import EventLog
from shared.messages.plans import Admission, BeamStep, StepPlan

Masks = npt.NDArray[np.uint32]
_BITS = 32

log = EventLog(__name__)


class Grammars:
    """Keeps a matcher for each sequence with a grammar.

    A text that cannot go on, since its grammar has ended or fails, may only end.

    Args:
        tokenizer: of the model; None: texts with a grammar end at once.
        vocab_size: V.
        eos_token_ids: that end texts.
        device: of the logits.

    Attributes:
        thread: computes masks; while it does, nothing else may be called.
    """

    def __init__(
        self,
        tokenizer: LLTokenizer | None,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        device: torch.device,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._device = device
        self._matchers: dict[int, LLMatcher | None] = {}  # by handle; None: it may only end
        self.thread = ThreadPoolExecutor(1, "grammar")
        width = -(-vocab_size // _BITS)
        self._only_end = np.zeros(width, np.uint32)
        for token in eos_token_ids:
            if not 0 <= token < vocab_size:
                continue  # configurations may name tokens that the model does not have
            self._only_end[token // _BITS] |= np.uint32(1 << token % _BITS)

    def __len__(self) -> int:
        return len(self._matchers)

    def reset(self) -> None:
        """Remove every sequence."""
        self._matchers.clear()

    def follow(self, plan: StepPlan) -> None:
        """Remove retired sequences, continue beams, begin with admitted ones, copy to forks."""
        if self._matchers:
            for handle in plan.retired.tolist():
                self._matchers.pop(handle, None)
            for step in plan.beams:
                self._continue(step)
        for new in plan.admissions:
            if new.sampling.grammar:
                self._matchers[new.handle] = self._begin(new)
        if self._matchers:
            forks = zip(plan.fork_parents.tolist(), plan.fork_children.tolist(), strict=True)
            for parent, child in forks:
                if parent in self._matchers:
                    self._matchers[child] = _copy(self._matchers[parent])

    def take(self, handles: IntArray, tokens: npt.NDArray[np.int64]) -> None:
        """Append a token to each of these sequences [n]; those that were retired are skipped."""
        for handle, token in zip(handles.tolist(), tokens.tolist(), strict=True):
            matcher = self._matchers.get(handle)
            if matcher is not None and not matcher.is_stopped():
                self._consume(handle, matcher, [token])

    def masks(self, handles: npt.NDArray[np.int32]) -> Masks:
        """Masks [n, V / 32] with a bit for each token that these sequences may choose next."""
        masks = np.zeros((len(handles), len(self._only_end)), np.uint32)
        for row, handle in zip(masks, handles.tolist(), strict=True):
            matcher = self._matchers[handle]
            if matcher is None or matcher.is_stopped():
                row[:] = self._only_end
                continue
            matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if matcher.is_error():
                self._fail(handle, matcher)
                row[:] = self._only_end
        return masks

    def unpack(
        self,
        masks: Masks,  # [n, V / 32]
    ) -> torch.Tensor:
        """Whether each token is allowed, [n, V] bool on the device of the logits."""
        if self._device.type == "cpu":
            octets, count = masks.view(np.uint8), self._vocab_size
            bits = np.unpackbits(octets, axis=1, count=count, bitorder="little")
            return torch.from_numpy(bits.view(np.bool_))
        packed = torch.from_numpy(masks.view(np.int32)).pin_memory()
        packed = packed.to(self._device, non_blocking=True)
        place = torch.arange(_BITS, dtype=torch.int32, device=self._device)
        found = (packed.unsqueeze(2) >> place) & 1
        return found.flatten(1)[:, : self._vocab_size] != 0

    def _begin(self, new: Admission) -> LLMatcher | None:
        if self._tokenizer is None:
            log.error("a text with a grammar ends at once: no tokenizer", handle=new.handle)
            return None
        matcher = LLMatcher(self._tokenizer, new.sampling.grammar, log_level=0)
        generated = new.tokens[new.num_prompt_tokens :].tolist()
        self._consume(new.handle, matcher, generated)
        return None if matcher.is_error() else matcher

    def _continue(self, step: BeamStep) -> None:
        """Copy parents to the beams that continue them, and append each beam's token."""
        parents = step.parents.tolist()
        if not any(parent in self._matchers for parent in parents):
            return
        before = {parent: self._matchers[parent] for parent in parents}
        beams = zip(step.handles.tolist(), parents, step.tokens.tolist(), strict=True)
        for handle, parent, token in beams:
            matcher = _copy(before[parent])
            self._matchers[handle] = matcher
            if matcher is not None and not matcher.is_stopped():
                self._consume(handle, matcher, [token])

    def _consume(self, handle: int, matcher: LLMatcher, tokens: list[int]) -> None:
        if not matcher.consume_tokens(tokens):
            self._fail(handle, matcher)

    def _fail(self, handle: int, matcher: LLMatcher) -> None:
        # The gateway has compiled the grammar, and only allowed tokens are chosen. What remains
        # is a limit of llguidance's that a long text reaches.
        log.error("a grammar fails, its text ends", handle=handle, because=matcher.get_error())
        self._matchers[handle] = None


def _copy(matcher: LLMatcher | None) -> LLMatcher | None:
    return None if matcher is None else matcher.deep_copy()
