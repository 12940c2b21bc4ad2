"""The check at load: compares PageStream's attention and layers with the model's own code.

Every decoder layer is called with the inputs that the model's own code has computed, so that its
error is isolated, and can be compared with the error of the model's own code in this layer. Then
the logits of an ordinary pass are compared, in which the errors of all layers add up.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from gpu_worker.kv.allocation import Allocator
from gpu_worker.model.check.deviation import (
    CheckResult,
    Deviation,
    Outputs,
    judge,
    may_jump,
    relative_error,
)
from gpu_worker.model.check.narrow_windows import length_to_check, narrow_windows
from gpu_worker.model.check.ragged_pass import RaggedPass, Span, num_blocks_for, row_groups
from gpu_worker.model.check.reference_pass import LayerReferences, compute_references
from gpu_worker.model.check.tokens import check_sequences
from gpu_worker.model.check.watched_layers import LayerCall, WatchedLayers
from gpu_worker.model.ragged_model import LayerShape, RaggedModel
from kernels.interface import AttentionBackend
from kernels.reference import ReferenceBackend
from shared.errors import ModelUnsupported

_FAULTS = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class ModelCheck:
    """Computes references from a model as it was loaded, and compares it with them later.

    Args:
        model: as it was loaded.
        shapes: its attention layers.
        max_model_len: longest sequence in tokens.
        text: token ids of a text, see ``check_sequences``.
        references: compute the layers that others are compared with; None: the model's own do.

    Raises:
        ModelUnsupported: the model's own code fails, or has no decoder layers to compare.
    """

    def __init__(
        self,
        model: RaggedModel,
        shapes: Sequence[LayerShape],
        max_model_len: int,
        text: Sequence[int] = (),
        references: LayerReferences | None = None,
    ) -> None:
        self._model = model
        self._shapes = shapes
        self._max_model_len = max_model_len
        self._layers = WatchedLayers(model.model, [shape.module for shape in shapes])
        self._may_jump = [may_jump(layer, model.dtype) for layer in self._layers.layers]
        with narrow_windows(model, max_model_len) as narrowed:
            length = length_to_check(model, narrowed or shapes, max_model_len)
            tokens = check_sequences(model.vocab_size, length, text, model.device)
            with _as_unsupported("its own code fails"):
                self._references = compute_references(model, self._layers, tokens, references)
        self._tokens = tokens
        self._lengths = [len(each) for each in tokens]

    def layers(self, instead: str) -> CheckResult:
        """Compare layers that were replaced since, run with the model's own attention.

        Args:
            instead: advice for the error if they do not compute the same.

        Raises:
            ModelUnsupported: they fail, or deviate by more than rounding explains.
        """

        def logits() -> torch.Tensor:
            return torch.cat([self._model.eager_logits(each) for each in self._tokens])

        with narrow_windows(self._model, self._max_model_len):
            groups = row_groups(self._lengths, ragged=False)
            with _as_unsupported("with replaced layers", instead):
                stages = self._forced(self._by_sequence)
                found = logits()
            deviations = [judge(stage, groups) for stage in stages]
            return self._result("with replaced layers", deviations, found, groups, instead)

    def attention(
        self, backend: AttentionBackend, allocator: Allocator, kv_dtype: torch.dtype | None = None
    ) -> CheckResult:
        """Compare paged attention in ragged steps with the model's own attention.

        A cache of another type than the model's rounds keys and values. Then plain torch over a
        cache of the model's type is compared with the model, and the backend with plain torch over
        a cache of ``kv_dtype``. The result has the error that this type adds to the logits.

        Raises:
            ModelUnsupported: it deviates by more than rounding explains.
        """
        how, groups = "with paged attention", row_groups(self._lengths, ragged=True)
        if kv_dtype is None or kv_dtype == self._shapes[0].dtype:
            stages, found = self._paged(backend, allocator)
            return self._result(how, [judge(each, groups) for each in stages], found, groups)
        plain = ReferenceBackend()
        stages, found = self._paged(plain, allocator)
        self._result(how, [judge(each, groups) for each in stages], found, groups)
        theirs, rounded = self._paged(plain, allocator, kv_dtype)
        ours, found = self._paged(backend, allocator, kv_dtype)
        deviations = [
            judge(replace(our, found=our.exact + (our.found - their.found)), groups)
            for our, their in zip(ours, theirs, strict=True)
        ]
        how = f"with a KV cache of {str(kv_dtype).removeprefix('torch.')}"
        return self._result(how, deviations, found, groups, own=rounded)

    def _paged(
        self, backend: AttentionBackend, allocator: Allocator, kv_dtype: torch.dtype | None = None
    ) -> tuple[list[Outputs], torch.Tensor]:
        """All stages with paged attention, and the logits [T, vocabulary] of an ordinary pass."""
        with narrow_windows(self._model, self._max_model_len) as narrowed:
            size = allocator.block_size
            shapes = narrowed or self._shapes
            if kv_dtype is not None:
                shapes = [replace(shape, dtype=kv_dtype) for shape in shapes]
            memory = allocator.allocate(shapes, num_blocks_for(self._lengths, size))
            ragged = RaggedPass(self._model, backend, memory, size, self._tokens)

            def run(observe: "_Observe") -> torch.Tensor:
                def visit(call: LayerCall) -> torch.Tensor:
                    return observe(call, ragged.spans)

                with self._layers.visited(visit):
                    return ragged.logits()

            stages = self._forced(run)
            found = ragged.logits()
            memory.close()
        return stages, found

    def _by_sequence(self, observe: "_Observe") -> torch.Tensor:
        """Logits [T of all, vocabulary] of a pass over each sequence, one after the other."""
        found = []
        for index, tokens in enumerate(self._tokens):
            spans = [(0, len(each) if n == index else 0) for n, each in enumerate(self._tokens)]

            def visit(call: LayerCall, spans: list[Span] = spans) -> torch.Tensor:
                return observe(call, spans)

            with self._layers.visited(visit):
                found.append(self._model.eager_logits(tokens))
        return torch.cat(found)

    def _forced(self, run: "Callable[[_Observe], torch.Tensor]") -> list[Outputs]:
        """Outputs of every stage, given the inputs that the model's own code has computed."""
        references, model = self._references, self._model
        parts: list[list[list[torch.Tensor]]] = [
            [[] for _ in references] for _ in range(len(self._layers))
        ]
        embedded: list[list[torch.Tensor]] = [[] for _ in references]

        def observe(call: LayerCall, spans: Sequence[Span]) -> torch.Tensor:
            sizes = [b - a for a, b in spans]
            inputs = [
                each.input_of(call.index)[a:b]
                for each, (a, b) in zip(references, spans, strict=True)
            ]
            if not call.index:
                _append(embedded, torch.split(call.hidden[0], sizes))
            out = call.run(torch.cat(inputs).unsqueeze(0))
            _append(parts[call.index], torch.split(out[0], sizes))
            if call.index < len(self._layers) - 1:
                return out
            last = [each.own[-1][a:b] for each, (a, b) in zip(references, spans, strict=True)]
            return torch.cat(last).unsqueeze(0)

        logits = run(observe)
        dtype, layers = model.dtype, range(len(self._layers))
        before = torch.cat([each.embedded for each in references])
        own_logits = torch.cat([each.own_logits for each in references])
        stages = [Outputs("embeddings", _joined(embedded), before, before, dtype)]
        for index in layers:
            own = torch.cat([each.own[index] for each in references])
            exact = own
            if dtype != torch.float32:
                exact = torch.cat([each.exact[index] for each in references])
            name = f"the outputs of decoder layer {index}"
            found = _joined(parts[index])
            stages.append(Outputs(name, found, own, exact, dtype, self._may_jump[index]))
        stages.append(Outputs("logits after the last layer", logits, own_logits, own_logits, dtype))
        return stages

    def _result(
        self,
        how: str,
        deviations: Sequence[Deviation],
        logits: torch.Tensor,  # [T, vocabulary]
        groups: Sequence[torch.Tensor],
        instead: str = "",
        own: torch.Tensor | None = None,  # [T, vocabulary]
    ) -> CheckResult:
        """The worst deviation of all stages and of the logits of an ordinary pass.

        Args:
            own: logits whose errors are the unit of that pass; None: the model's own.
        """
        exact = torch.cat([each.own_logits for each in self._references])
        own = exact if own is None else own
        if self._model.dtype != torch.float32:
            exact = torch.cat([each.exact_logits for each in self._references])
        whole = Outputs(
            "logits", logits, own, exact, self._model.dtype, any(self._may_jump), is_end=True
        )
        all_ = [*deviations, judge(whole, groups)]
        failed = next((each for each in all_ if not each.passed), None)
        if failed is not None:
            advice = f"; {instead}" if instead else ""
            raise ModelUnsupported(f"{how} {failed}{advice}")
        return CheckResult(
            worst=max(all_, key=lambda each: each.severity),
            error=relative_error(logits, exact),
            own_error=relative_error(own, exact),
            num_tokens=sum(self._lengths),
        )


_Observe = Callable[[LayerCall, Sequence[Span]], torch.Tensor]
"""Gets a call of a layer and its span of tokens of each sequence; returns the layer's output."""


@contextmanager
def _as_unsupported(what: str, instead: str = "") -> Iterator[None]:
    """Turn errors of the model's code into ModelUnsupported; errors of the machine stay."""
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except _FAULTS as error:
        why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise ModelUnsupported(f"{what}: {why}{'; ' if instead else ''}{instead}") from error


def _append(parts: Sequence[list[torch.Tensor]], more: Sequence[torch.Tensor]) -> None:
    for each, part in zip(parts, more, strict=True):
        each.append(part.clone())


def _joined(parts: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """Rows [T of all, K] of all parts, sequence by sequence."""
    return torch.cat([part for each in parts for part in each])
