"""Makes a typical result of a step, for benchmarks that stand in for a worker."""

import numpy as np

from shared.codec import IntArray
from shared.messages.endings import EndFlag
from shared.messages.outputs import StepResult


def plain_result(
    step: int, handles: IntArray, token: int, ended: IntArray, end: EndFlag = EndFlag.LENGTH
) -> StepResult:
    """A result with the same token for every sequence; rows ``ended`` end, all for one reason."""
    none = np.empty(0, np.int32)
    return StepResult(
        step=step,
        handles=handles,
        tokens=np.full(len(handles), token, np.int32),
        ended_rows=ended,
        ended_flags=np.full(len(ended), end, np.int32),
        beams=(),
        logprobs=(),
        prompt_logprobs=(),
        admitted_handles=none,
        admitted_computed=none,
        num_batched_tokens=len(handles),
        model_us=0,
        step_us=0,
    )
