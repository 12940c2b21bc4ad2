"""Worker processes: they form a group if there are several ranks, then the real loop runs."""

from typing import TYPE_CHECKING

from gpu_worker.ranks.formation import form_group
from gpu_worker.ranks.member import Member
from gpu_worker.service import WorkerService
from shared.bus.keys import EngineKeys
from shared.messages.leases import KVGeometry, ModelInfo, Speeds
from tests.simulation.deployment.loop import Party
from tests.simulation.deployment.model import BLOCK_SIZE, ModelExecutor
from tests.simulation.deployment.processes import Silent
from tests.simulation.deployment.ranks import RankThread

if TYPE_CHECKING:
    from tests.simulation.deployment.world import World

ENGINE = "engine-0"
MODEL = ModelInfo("demo", 10_000, 256, "float32", (0,))


async def run_worker(world: "World", party: Party, member: Member) -> None:
    """Serve as a rank, after all ranks of a group have met."""
    bus, executor, thread = world.bus_of(party), None, None
    if not member.is_alone:
        member = await form_group(
            bus,
            EngineKeys(ENGINE),
            member,
            party.name,
            world.meeting.of(party, member.rank),
            lambda: f"group of {party.name}, at {world.loop.time()}",
            world.loop.sleep,
        )
        group = world.meeting.groups[member.group]
        executor = group.executors[member.rank]
        thread = RankThread(group, member, party)
    kv = KVGeometry(world.profile.num_blocks, BLOCK_SIZE, 64, world.profile.num_host_blocks)
    service = WorkerService(
        bus,
        ENGINE,
        executor or ModelExecutor(world.model, world.profile.max_num_batched_tokens),
        MODEL,
        kv,
        Speeds(prefill_tokens_per_s=1e5, swap_bytes_per_s=world.profile.swap_bytes_per_s),
        Silent(),
        member,
        clock_s=world.loop.time,
        thread=thread,
    )
    world.stops[party] = service.stop
    await service.run()
