"""Block tables: the blocks that hold the keys and values of each sequence, and their sharing."""

from itertools import chain

from scheduler_svc.core.blocks import prefix_hashes
from scheduler_svc.core.blocks.block_pool import BlockHash, BlockPool
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.sequences.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step.plan_draft import PlanDraft


class BlockTables:
    """Allocates blocks for sequences, shares those whose content is known, and frees them.

    Attributes:
        pool: blocks of the device.
        host_pool: blocks of the host, for swapping.
        retired: handles of sequences that lost their blocks; the next plan makes the worker forget
            them.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._block_size = config.block_size
        self._tenants_share = config.tenants_share_prefixes
        self.pool = BlockPool(config.num_blocks, config.prefix_caching)
        self.host_pool = BlockPool(config.num_host_blocks, keeps_cached=False)
        self.retired: list[int] = []

    def admit(self, group: SequenceGroup, reserve: int) -> bool:
        """Allocate blocks for all tokens of the group's ``prefilled`` sequences, or none.

        Blocks that other sequences have computed, or an earlier one of the group will compute, are
        shared; each sequence's ``num_planned`` becomes the number of their tokens.

        Args:
            reserve: blocks that must stay free.

        Returns:
            Whether there were enough free blocks.
        """
        num_blocks = -(-group.num_tokens // self._block_size)
        if group.chain is None or group.chain.num_pin_changes != self.pool.num_pin_changes:
            self._choose_chain(group)
        if len(group.prefilled) == 1:
            return self._admit_one(group, group.prefilled[0], num_blocks, reserve)
        hits = [self._hits(group, sequence) for sequence in group.prefilled]
        lengths = self._num_shared_blocks(group, hits)
        fresh = sum(num_blocks - length for length in lengths)
        taken = self.pool.num_cached_in({block for found in hits for block in found})
        if fresh + taken + reserve > self.pool.num_free:
            return False
        for sequence, found in zip(group.prefilled, hits, strict=True):
            self.pool.take(found)
            sequence.block_table = found
        promised: dict[BlockHash, int] = {}
        for sequence, length in zip(group.prefilled, lengths, strict=True):
            table = sequence.block_table
            # Computed by earlier sequences, whose chunks are planned before this one's.
            rest = [promised[found] for found in sequence.hashes[len(table) : length]]
            self.pool.fork(rest)
            more = self.pool.allocate(num_blocks - length)
            assert more is not None, "the blocks were counted"
            sequence.block_table = table + rest + more
            sequence.num_planned = length * self._block_size
            promised.update(zip(sequence.hashes, sequence.block_table, strict=False))
        return True

    def _admit_one(
        self, group: SequenceGroup, sequence: Sequence, num_blocks: int, reserve: int
    ) -> bool:
        """The same for a group with one sequence, as most: a waiting group tries in many steps."""
        found = self._hits(group, sequence)
        pool = self.pool
        fresh = num_blocks - len(found)
        if fresh + reserve + (pool.num_cached_in(found) if found else 0) > pool.num_free:
            return False
        pool.take(found)
        more = pool.allocate(fresh)
        assert more is not None, "the blocks were counted"
        sequence.num_planned = len(found) * self._block_size
        sequence.block_table = found + more
        return True

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a child share all of its parent's blocks, on the device and on the host."""
        child.block_table = list(parent.block_table)
        child.host_table = list(parent.host_table)
        child.hashes = list(parent.hashes)
        self.pool.fork(child.block_table)
        self.host_pool.fork(child.host_table)

    def num_blocks_needed(self, group: SequenceGroup, position: int) -> int:
        """New blocks that the group's sequences need to write at this position."""
        if position % self._block_size == 0:
            return len(group.sequences)
        column = position // self._block_size
        owners = {sequence.block_table[column] for sequence in group.sequences}
        # Of the sequences that share a block, the last one keeps it.
        return len(group.sequences) - len(owners)

    def grow(
        self, group: SequenceGroup, position: int, blocks: list[int], draft: PlanDraft
    ) -> None:
        """Let the group's sequences write at this position: in new blocks at a block border, else
        in copies of shared blocks.

        Args:
            blocks: allocated ones; the last ``num_blocks_needed`` are taken off the list.
        """
        if position % self._block_size == 0:
            for sequence in group.sequences:
                block = blocks.pop()
                sequence.block_table.append(block)
                draft.grown_handles.append(sequence.handle)
                draft.grown_blocks.append(block)
            return
        column = position // self._block_size
        for sequence in group.sequences:
            table = sequence.block_table
            if self.pool.references(table[column]) > 1:
                source, table[column] = table[column], blocks.pop()
                self.pool.free([source])
                draft.copy(sequence.handle, column, source, table[column])

    def num_blocks_of(self, group: SequenceGroup) -> int:
        """Number of device blocks of the group's tables, each counted once."""
        return len(_distinct(group))

    def swap_out(self, group: SequenceGroup, draft: PlanDraft) -> None:
        """Copy the group's blocks to the host pool, which must have room; sharing is kept."""
        blocks = _distinct(group)
        hosts = self.host_pool.allocate(len(blocks))
        assert hosts is not None, "the host pool has room"
        hosts.reverse()  # the order of single allocations
        draft.swap_out_device += blocks
        draft.swap_out_host += hosts
        host_of = dict(zip(blocks, hosts, strict=True))
        for sequence in group.sequences:
            sequence.host_table = [host_of[block] for block in sequence.block_table]
        if len(group.sequences) > 1:
            for sequence in group.sequences:
                self.host_pool.fork(sequence.host_table)
            self.host_pool.free(hosts)  # only the tables refer to them

    def swap_in(self, group: SequenceGroup, reserve: int, draft: PlanDraft) -> bool:
        """Bring a swapped group back to the device, or nothing.

        Its next tokens are written at position ``num_tokens - 1``: the block there is each
        sequence's own.
        """
        num_blocks = -(-group.num_tokens // self._block_size)
        column = num_blocks - 1
        needed = num_blocks
        if len(group.sequences) > 1:
            shared = {block for found in group.sequences for block in found.host_table[:column]}
            needed = len(shared) + len(group.sequences)
        if needed + reserve > self.pool.num_free:
            return False
        blocks = self.pool.allocate(needed)
        assert blocks is not None, "the blocks were counted"
        device_of: dict[int, int] = {}
        for sequence in group.sequences:
            table = sequence.block_table
            for host in sequence.host_table[:column]:
                device = device_of.get(host)
                if device is None:
                    device = device_of[host] = blocks.pop()
                    draft.swap_in(host, device)
                else:
                    self.pool.fork([device])
                table.append(device)
            table.append(blocks.pop())
            for host in sequence.host_table[column:]:  # empty if the next token opens a block
                draft.swap_in(host, table[column])
            sequence.num_planned = group.num_tokens - 1
            self.register_planned(sequence, before=0)
            self.release_swapped(sequence)
        return True

    def release_swapped(self, sequence: Sequence) -> None:
        """Free a sequence's host blocks.

        A plan's swaps out are executed before its swaps in, so host blocks that are freed here must
        not be allocated again for the same plan. They are not: a step preempts before it admits.
        """
        self.host_pool.free(sequence.host_table)
        sequence.host_table = []

    def release(self, sequence: Sequence) -> None:
        """Free a sequence's device blocks, and let the next plan retire it on the worker.

        A plan in flight may still compute the sequence. Plans are executed in order, so that is
        done before another sequence writes to the blocks.
        """
        self.pool.free(sequence.block_table)
        sequence.block_table = []
        if sequence.is_resident:
            self.retired.append(sequence.handle)
            sequence.is_resident = False

    def register_computed(
        self, group: SequenceGroup, sequence: Sequence, num_computed: int
    ) -> None:
        """Make the full blocks of a sequence findable, if it has any.

        Args:
            num_computed: tokens of prompt and ``output`` that have keys and values.
        """
        if not sequence.block_table or self.pool.has_no_cache:
            return  # shared prompt blocks were registered when they were planned
        first = len(sequence.hashes)
        if num_computed // self._block_size > first:
            assert group.chain is not None, f"{group.request_id} has blocks but no hash chain"
            tokens = group.tokens_of(sequence)[:num_computed]
            group.chain.extend(sequence.hashes, tokens, self._block_size)
            end = len(sequence.hashes)
            self.pool.register(sequence.block_table[first:end], sequence.hashes[first:])

    def register_planned(self, sequence: Sequence, before: int) -> None:
        """Make blocks findable that are full now but were not with ``before`` planned tokens."""
        # Blocks without a hash were generated before a swap; they get one when they are released.
        num_full = min(sequence.num_planned // self._block_size, len(sequence.hashes))
        first = before // self._block_size
        self.pool.register(sequence.block_table[first:num_full], sequence.hashes[first:num_full])

    def _hits(self, group: SequenceGroup, sequence: Sequence) -> list[int]:
        """Known blocks with a sequence's beginning; at least one token is left to compute."""
        num_full = group.num_tokens // self._block_size
        if len(sequence.hashes) < num_full:
            assert group.chain is not None, f"{group.request_id} has no hash chain"
            group.chain.extend(sequence.hashes, group.tokens_of(sequence), self._block_size)
        if group.submit.sampling.num_prompt_logprobs is not None:
            return []  # log-probabilities need the logits of every prompt token
        return self.pool.find(sequence.hashes[: (group.num_tokens - 1) // self._block_size])

    def _choose_chain(self, group: SequenceGroup) -> None:
        """Choose the hash chain of a group without blocks: it decides which tenants find them.

        What all tenants share depends on what is pinned, so a group that is admitted again may get
        another chain than before.
        """
        submit, pool = group.submit, self.pool
        if self._tenants_share or group.computes_prefix:
            chain = prefix_hashes.shared_chain(submit.cache_salt, pool)
        else:
            chain = prefix_hashes.tenant_chain(
                submit.tenant, submit.cache_salt, submit.prompt, self._block_size, pool
            )
        if group.chain is not None and not chain.is_like(group.chain):
            for sequence in group.sequences:
                sequence.hashes = []
        group.chain = chain

    def _num_shared_blocks(self, group: SequenceGroup, hits: list[list[int]]) -> list[int]:
        """Number of leading blocks of each sequence that are known, or that an earlier one has too.

        At least the prompt's full blocks, on which ``why_never`` counts.
        """
        limit = (group.num_tokens - 1) // self._block_size
        seen: set[BlockHash] = set()
        lengths = []
        for sequence, found in zip(group.prefilled, hits, strict=True):
            length = len(found)
            while length < limit and sequence.hashes[length] in seen:
                length += 1
            lengths.append(length)
            seen.update(sequence.hashes)
        return lengths


def _distinct(group: SequenceGroup) -> list[int]:
    """Device blocks of a group, in the order of its tables."""
    if len(group.sequences) == 1:
        return group.sequences[0].block_table
    tables = [found.block_table for found in group.sequences]
    return list(dict.fromkeys(chain(*tables)))
