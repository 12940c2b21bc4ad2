"""Prefixes that the operator keeps in the pool (PagedAttention, section 4.4).

The content of a prefix's full blocks is pinned by its hashes before it exists. A block of it stays
whether it is computed by a request that begins with the prefix or by the internal request made
here. Pinned content has the hashes that all tenants share: the operator provides it for all.
"""

from collections import OrderedDict, defaultdict
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core import events
from scheduler_svc.core.blocks import prefix_hashes
from scheduler_svc.core.blocks.block_pool import BlockHash, BlockPool
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.sequences.sequence import SequenceGroup
from shared.messages.leases import PrefixState, PrefixStatus
from shared.messages.requests import Pin, Submit
from shared.sampling import SamplingParams

_BEHIND_ALL_CLIENTS = 2**31  # theirs are below
# A request ends by sampling a token; this one is dropped.
_SAMPLING = SamplingParams.greedy(1)


@dataclass(slots=True, eq=False)
class PinnedPrefix:
    """A prefix whose content is pinned."""

    pin: Pin
    hashes: list[BlockHash]  # of its full blocks
    is_computed: bool = False
    group: SequenceGroup | None = None  # that was made to compute it; may have ended


class PinnedPrefixes:
    """Pinned prefixes in the order of their last use.

    A prefix is given up only where a request could not run otherwise. It is forgotten then: a
    gateway that misses it in the engine's status sends its Pin again.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self._config = config
        self._pool = pool
        self._pinned: OrderedDict[str, PinnedPrefix] = OrderedDict()  # least recently used first
        self._refused: dict[str, PrefixStatus] = {}
        self._by_last_block: defaultdict[BlockHash, list[str]] = defaultdict(list)
        self._events: list[events.Event] = []

    def __len__(self) -> int:
        return len(self._pinned)

    def add(self, pin: Pin) -> Submit | None:
        """Pin a prefix, if that is new and possible; return the request to compute it, if any."""
        prefix_id = pin.prefix_id
        if prefix_id in self._pinned or prefix_id in self._refused:
            return None
        hashes = prefix_hashes.shared_hashes(pin.cache_salt, pin.tokens, self._config.block_size)
        if (reason := self._why_not(pin, hashes)) is not None:
            self._refused[prefix_id] = PrefixStatus(prefix_id, PrefixState.REFUSED, len(hashes))
            self._events.append(events.PrefixRefused(prefix_id, pin.name, reason))
            return None
        self._pinned[prefix_id] = PinnedPrefix(pin, hashes)
        self._by_last_block[hashes[-1]].append(prefix_id)
        self._pool.pin(hashes)
        if len(self._pool.find(hashes)) == len(hashes):
            self.computed(prefix_id)
            return None
        return self._request(self._pinned[prefix_id])

    def computed_by(self, group: SequenceGroup) -> None:
        """Store the group that computes a prefix; its request has the prefix's id."""
        self._pinned[group.request_id].group = group

    def computed(self, prefix_id: str) -> None:
        """Mark a prefix as computed: all of its blocks are planned."""
        found = self._pinned[prefix_id]
        found.is_computed = True
        num_tokens = len(found.hashes) * self._config.block_size
        self._events.append(events.PrefixPinned(prefix_id, found.pin.name, num_tokens))

    def touch(self, group: SequenceGroup) -> None:
        """Mark the prefixes with which an admitted group begins as used."""
        if self._by_last_block:
            for block_hash in group.sequences[0].hashes:
                for prefix_id in self._by_last_block.get(block_hash, ()):
                    self._pinned.move_to_end(prefix_id)

    def give_up(self, beneficiary: SequenceGroup) -> PinnedPrefix | None:
        """Unpin the least recently used prefix and return it; None if none is left."""
        if not self._pinned:
            return None
        prefix_id, found = self._pinned.popitem(last=False)
        last = found.hashes[-1]
        self._by_last_block[last].remove(prefix_id)
        if not self._by_last_block[last]:
            del self._by_last_block[last]
        self._pool.unpin(found.hashes)
        by, num_blocks = beneficiary.request_id, len(found.hashes)
        self._events.append(events.PrefixGivenUp(prefix_id, found.pin.name, by, num_blocks))
        return found

    def statuses(self) -> tuple[PrefixStatus, ...]:
        """Status of each prefix that was pinned or refused."""
        pinned = [
            PrefixStatus(
                prefix_id,
                PrefixState.PINNED if found.is_computed else PrefixState.PENDING,
                len(found.hashes),
            )
            for prefix_id, found in self._pinned.items()
        ]
        return (*pinned, *self._refused.values())

    def take_events(self) -> list[events.Event]:
        """Events since the last call."""
        taken, self._events = self._events, []
        return taken

    def _why_not(self, pin: Pin, hashes: list[BlockHash]) -> str | None:
        """Why a prefix cannot be pinned, or None."""
        config = self._config
        num_tokens = len(pin.tokens)
        if not hashes:
            return f"it has {num_tokens} tokens, and full blocks of {config.block_size} are pinned"
        if len(hashes) * config.block_size >= config.max_model_len:
            return f"it has {num_tokens} tokens, the model's context is {config.max_model_len}"
        wanted = self._pool.num_pinned_with(hashes)
        if wanted > config.max_pinned_blocks:
            return (
                f"it has {len(hashes)} blocks; with it {wanted} would be pinned, at most "
                f"{config.max_pinned_blocks} of the pool's {config.num_blocks} may be"
            )
        return None

    def _request(self, found: PinnedPrefix) -> Submit:
        num_tokens = len(found.hashes) * self._config.block_size
        return Submit(
            request_id=found.pin.prefix_id,
            gateway="",
            attachment="",
            prompt=np.asarray(found.pin.tokens[:num_tokens], np.int32),
            sampling=_SAMPLING,
            received_ms=0,
            num_choices=1,
            priority=_BEHIND_ALL_CLIENTS,
            cache_salt=found.pin.cache_salt,
        )
