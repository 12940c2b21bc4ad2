"""Starting an epoch: fence off all earlier writers, then read what they left in the log."""

from collections.abc import Sequence
from dataclasses import dataclass
from secrets import token_hex

import numpy as np

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.outputs.history import History
from scheduler_svc.outputs.prompts_log import (
    PromptsLog,
    Reference,
    StoredPrompts,
    read_prompts,
)
from scheduler_svc.past.plans_history import PlansHistory
from scheduler_svc.recording import FileRecorder
from scheduler_svc.recovery import Recovery, resume
from shared.bus.api import Append, Bus, EntryId
from shared.bus.keys import EngineKeys
from shared.codec import encode
from shared.errors import PageStreamError
from shared.logs import EventLog
from shared.messages.outputs import RequestState
from shared.messages.plans import EpochStarted
from shared.outputs_log.events import Damaged
from shared.outputs_log.reader import OutputsReader

_PAGE = 1_000  # entries per read
_STATES_PER_ENTRY = 64  # an entry should stay small enough to be read at once

log = EventLog(__name__)


class EpochOver(PageStreamError):
    """This epoch cannot go on; a new one can."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """An epoch that has begun.

    Attributes:
        core: has all unfinished requests.
        history: what earlier epochs left in ``outputs``.
        prompts: takes the prompts of what is appended to ``outputs``.
    """

    number: int
    core: Scheduler
    history: History
    prompts: PromptsLog


async def start_epoch(
    bus: Bus,
    keys: EngineKeys,
    config: SchedulerConfig,
    scheduler: str,
    workers: tuple[str, ...],
    recorder: FileRecorder | None,
    suspects: Sequence[int] = (),
    above: int = 0,
    plans_history: PlansHistory | None = None,
) -> Epoch:
    """Begin a new epoch of the named parties.

    Args:
        suspects: handles of the epoch before that a worker was computing when it died.
        above: the epoch before, as far as is known. Where logs are deleted and the server's clock
            goes back, readers whose cursors stand there still read what comes.
        plans_history: plans of earlier epochs that are kept; None: none are.

    Raises:
        StaleWriter: another scheduler started one at the same moment.
        BusUnavailable: whether the epoch began is unknown; start another.
    """
    tops = [await bus.last_id(keys.plans), await bus.last_id(keys.outputs)]
    epoch = max(await bus.now_ms(), above + 1, *(top.epoch + 1 for top in tops))
    handles = np.array(suspects, np.int32)
    started = encode(EpochStarted(epoch, scheduler, workers, handles, token_hex(8)))
    fence = EntryId(epoch, 0)
    plans_min_id = fence if plans_history is None else plans_history.plans_min_id(fence)
    await bus.append_all(
        [
            Append(keys.plans, [started], epoch, 0, trim_below=plans_min_id),
            Append(keys.prompts, [started], epoch, 0),
            Append(keys.outputs, [started], epoch, 0),
        ]
    )
    recovery = Recovery(config.max_model_len)
    stored = await read_prompts(bus, keys.prompts, fence, config.vocab_size)
    left = await replay_until(bus, keys.outputs, fence, recovery, config.vocab_size, stored)
    prompts = PromptsLog(keys, epoch, left.references)
    await bus.trim(keys.prompts, prompts.first_needed_id)
    # Where requests has lost its end, what comes next has ids below the cursor.
    cursor = min(recovery.requests_cursor, await bus.last_id(keys.requests))
    core = Scheduler(config, cursor)
    # Only a recorder needs the endings, and there may be many.
    known = [] if recorder is None else [encode(message) for message in recovery.endings()]
    states = resume(core, recovery, fence)
    if recorder is not None:
        recorder.epoch(fence, config, cursor, known + [encode(state) for state in states])
    for first in range(0, len(states), _STATES_PER_ENTRY):
        batch = states[first : first + _STATES_PER_ENTRY]
        prompts.appended((await bus.append_all(prompts.split(batch)))[-1])
    log.info("epoch started", epoch=epoch, workers=",".join(workers), recovered=len(states))
    return Epoch(epoch, core, History(left.sizes), prompts)


@dataclass(frozen=True, slots=True)
class Left:
    """What earlier epochs left in ``outputs``, oldest first.

    Attributes:
        sizes: of entries, in bytes, with the prompts that they refer to.
        references: to entries of ``prompts``.
    """

    sizes: list[tuple[EntryId, int]]
    references: list[Reference]


async def replay_until(
    bus: Bus,
    outputs: str,
    fence: EntryId,
    recovery: Recovery,
    vocab_size: int = 0,
    prompts: StoredPrompts | None = None,
) -> Left:
    """Read all entries of earlier epochs, and the fence, into ``recovery``.

    Args:
        prompts: to which states refer.
    """
    prompts = prompts or StoredPrompts()
    reader = OutputsReader(vocab_size)
    left = Left([], [])
    while reader.position.cursor < fence:
        cursors = {outputs: reader.position.cursor}
        entries = (await bus.read(cursors, 0, _PAGE)).get(outputs, [])
        if not entries:
            break
        for entry in entries:
            if entry.id > fence:
                return left
            num_bytes, prompts_id = entry.num_bytes, ""
            for event in reader.read(entry):
                if isinstance(event, Damaged):
                    log.warning("unreadable entry in outputs", entry=entry.id, error=event.error)
                if isinstance(event, RequestState) and event.prompt_at:
                    num_bytes += event.prompt_bytes
                    prompts_id = event.prompt_at
                    event = prompts.restore(event)
                recovery.apply(event)
            if entry.id < fence:
                left.sizes.append((entry.id, num_bytes))
                if prompts_id:
                    left.references.append(Reference(entry.id, EntryId.parse(prompts_id)))
    return left
