"""Follows the grammars of sequences, and computes which tokens each may choose next.

A mask follows from the grammar and the generated tokens alone. So a sequence that was preempted or
recovered, which is admitted again with its tokens, has the same masks as before.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLMatcher, LLTokenizer

from gpu_worker.grammar.compiled import CompiledGrammars
from shared.codec import IntArray
from shared.logs import EventLog
from shared.messages.plans import BeamStep, StepPlan

Masks = npt.NDArray[np.uint32]
BITS = 32
_SHOWN_CHARS = 400  # of llguidance's reason, which may quote all of the grammar

log = EventLog(__name__)


@dataclass(frozen=True, slots=True)
class _Admitted:
    """A sequence whose first mask is not computed yet: its grammar may still be compiled.

    Attributes:
        compiled: the grammar.
        generated: its tokens so far.
    """

    compiled: Future[LLMatcher]
    generated: list[int]


class Grammars:
    """Keeps a matcher for each sequence with a grammar.

    A text whose grammar has ended may only end. So may one that cannot follow its grammar, which
    fails then: the grammar cannot be compiled, allows no token, or reaches a limit of llguidance's.

    Args:
        tokenizer: of the model; None: all texts with a grammar fail.
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
        self._compiled = CompiledGrammars(tokenizer)
        self._vocab_size = vocab_size
        self._device = device
        # By handle; None: it has failed.
        self._matchers: dict[int, LLMatcher | _Admitted | None] = {}
        self.thread = ThreadPoolExecutor(1, "grammar")
        width = -(-vocab_size // BITS)
        self._only_end = np.zeros(width, np.uint32)
        for token in eos_token_ids:
            if not 0 <= token < vocab_size:
                continue  # configurations may name tokens that the model does not have
            self._only_end[token // BITS] |= np.uint32(1 << token % BITS)

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
        compiled: dict[int, Future[LLMatcher]] = {}  # by handle
        for new in plan.admissions:
            if new.has_grammar:
                generated = new.tokens[new.num_prompt_tokens :].tolist()
                compiled[new.handle] = found = (
                    compiled[new.grammar_of]
                    if new.grammar_of
                    else self._compiled.begin(new.sampling.grammar)
                )
                self._matchers[new.handle] = _Admitted(found, generated)
        if self._matchers:
            forks = zip(plan.fork_parents.tolist(), plan.fork_children.tolist(), strict=True)
            for parent, child in forks:
                if parent in self._matchers:
                    self._matchers[child] = _copy(self._matchers[parent])

    def take(self, handles: IntArray, tokens: npt.NDArray[np.int64]) -> None:
        """Append a token to each of these sequences [n]; those that were retired are skipped."""
        for handle, token in zip(handles.tolist(), tokens.tolist(), strict=True):
            if handle in self._matchers:
                matcher = self._matcher(handle)
                if matcher is not None and not matcher.is_stopped():
                    self._consume(handle, matcher, [token])

    def masks(self, handles: npt.NDArray[np.int32]) -> Masks:
        """Masks [n, V / 32] with a bit for each token that these sequences may choose next."""
        masks = np.zeros((len(handles), len(self._only_end)), np.uint32)
        for row, handle in zip(masks, handles.tolist(), strict=True):
            matcher = self._matcher(handle)
            if matcher is None or matcher.is_stopped():
                row[:] = self._only_end
                continue
            matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if matcher.is_error():
                self._fail(handle, matcher.get_error())
                row[:] = self._only_end
        return masks

    def failed(self, handles: IntArray) -> npt.NDArray[np.bool_]:
        """Which of these sequences [n] have failed."""
        found = (self._matchers.get(handle, _PRESENT) is None for handle in handles.tolist())
        return np.fromiter(found, np.bool_, len(handles))

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
        return unpacked(packed.to(self._device, non_blocking=True), self._vocab_size)

    def _matcher(self, handle: int) -> LLMatcher | None:
        """The matcher of a sequence, as soon as its grammar is compiled; None: it has failed."""
        found = self._matchers[handle]
        if not isinstance(found, _Admitted):
            return found
        try:
            matcher = found.compiled.result().deep_copy()
        except ValueError as error:
            self._fail(handle, str(error))
            return None
        self._matchers[handle] = matcher
        self._consume(handle, matcher, found.generated)
        return None if matcher.is_error() else matcher

    def _continue(self, step: BeamStep) -> None:
        """Copy parents to the beams that continue them, and append each beam's token."""
        parents = step.parents.tolist()
        if not any(parent in self._matchers for parent in parents):
            return
        before = {parent: self._matcher(parent) for parent in parents}
        beams = zip(step.handles.tolist(), parents, step.tokens.tolist(), strict=True)
        for handle, parent, token in beams:
            matcher = before[parent]
            matcher = None if matcher is None else matcher.deep_copy()
            self._matchers[handle] = matcher
            if matcher is not None and not matcher.is_stopped():
                self._consume(handle, matcher, [token])

    def _consume(self, handle: int, matcher: LLMatcher, tokens: list[int]) -> None:
        if not matcher.consume_tokens(tokens):
            self._fail(handle, matcher.get_error())

    def _fail(self, handle: int, reason: str) -> None:
        # The gateway has compiled the grammar, and only allowed tokens are chosen. What remains
        # is a limit of llguidance's that a long text reaches, or a grammar with a dead end.
        because = reason.partition("\n<state>")[0].strip()[:_SHOWN_CHARS]
        log.error("a text could not follow its grammar", handle=handle, because=because)
        self._matchers[handle] = None


_PRESENT = object()


def _copy(found: LLMatcher | _Admitted | None) -> LLMatcher | _Admitted | None:
    return found.deep_copy() if isinstance(found, LLMatcher) else found


def unpacked(
    packed: torch.Tensor,  # [n, V / 32] int32
    vocab_size: int,
) -> torch.Tensor:
    """The bits of masks, [n, V] bool on their device, without waiting for it."""
    place = torch.arange(BITS, dtype=torch.int32, device=packed.device)
    found = (packed.unsqueeze(2) >> place) & 1
    return found.flatten(1)[:, :vocab_size] != 0
