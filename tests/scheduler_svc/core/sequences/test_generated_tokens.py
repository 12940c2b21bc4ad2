"""Tokens of results go to the rows of their sequences, in any order of handles."""

import numpy as np
import pytest

from scheduler_svc.core.sequences.generated_tokens import TokenStore
from scheduler_svc.core.sequences.sequence import NO_TOKENS
from shared.codec import IntArray


def _ints(*values: int) -> IntArray:
    return np.array(values, np.int32)


def test_results_that_name_others_or_the_same_ones_in_another_order_are_kept_apart() -> None:
    store = TokenStore(4, 8)
    first, second = store.open(11, _ints(1, 2)), store.open(12, NO_TOKENS)
    store.append(_ints(11, 12), _ints(3, 30))
    store.append(_ints(11, 12), _ints(4, 40))
    store.append(_ints(12, 11), _ints(50, 5))
    store.append(_ints(12), _ints(60))
    assert store.output(first).tolist() == [1, 2, 3, 4, 5]
    assert store.output(second).tolist() == [30, 40, 50, 60]


def test_looking_at_a_row_between_two_equal_results_changes_nothing() -> None:
    store = TokenStore(2, 8)
    slot = store.open(7, NO_TOKENS)
    for token in (1, 2, 3):
        store.append(_ints(7), _ints(token))
        assert store.output(slot).tolist() == list(range(1, token + 1))


def test_a_sequence_that_comes_back_has_only_what_it_is_opened_with() -> None:
    store = TokenStore(2, 8)
    store.open(7, NO_TOKENS)
    store.append(_ints(7), _ints(1))
    assert store.close(7).tolist() == [1]
    store.append(_ints(7), _ints(2))  # of a plan in flight: without a slot
    store.open(7, _ints(1))
    store.append(_ints(7), _ints(3))
    assert store.close(7).tolist() == [1, 3]
    assert store.num_free_slots == 2


def test_results_without_a_slot_never_fill_the_spare_row() -> None:
    store = TokenStore(1, 3)
    for _ in range(20):
        store.append(_ints(5, 6), _ints(1, 2))
    store.append(NO_TOKENS, NO_TOKENS)
    slot = store.open(5, NO_TOKENS)
    store.append(_ints(5, 6), _ints(1, 2))
    assert store.output(slot).tolist() == [1]


def test_a_full_row_refuses_tokens_and_keeps_its_neighbour_from_getting_them() -> None:
    store = TokenStore(2, 3)
    full, other = store.open(1, _ints(1, 2)), store.open(2, NO_TOKENS)
    for token in (3, 4):
        store.append(_ints(1, 2), _ints(token, token))
    with pytest.raises(IndexError, match="has 4 tokens"):
        store.append(_ints(1, 2), _ints(5, 5))
    store.append(_ints(2), _ints(6))
    assert store.output(full).tolist() == [1, 2, 3, 4]
    assert store.output(other).tolist() == [3, 4, 6]


@pytest.mark.parametrize("num_slots", [3, 40])
def test_sequences_that_come_go_or_change_places_get_their_own_tokens(num_slots: int) -> None:
    random = np.random.default_rng(num_slots)
    store = TokenStore(num_slots, 2_000)
    tokens: dict[int, list[int]] = {}  # of those that have a row
    slots: dict[int, int] = {}
    handles = list(range(num_slots + 5))  # in results; some have no slot
    for step in range(2_000):
        handle = int(random.integers(num_slots + 5))
        if handle in tokens:
            if random.random() < 0.2:
                assert store.close(handle).tolist() == tokens.pop(handle)
        elif len(tokens) < num_slots:
            tokens[handle] = [-1] * int(random.integers(2))
            slots[handle] = store.open(handle, _ints(*tokens[handle]))
        if random.random() < 0.5:
            first, second = random.integers(len(handles), size=2)
            handles[first], handles[second] = handles[second], handles[first]
        spoken = handles[: int(random.integers(num_slots, num_slots + 5))]
        store.append(_ints(*spoken), np.arange(step, step + len(spoken), dtype=np.int32))
        for place, found in enumerate(spoken):
            if found in tokens:
                tokens[found].append(step + place)
        if random.random() < 0.1:
            for found, kept in tokens.items():
                assert store.output(slots[found]).tolist() == kept


def test_as_many_tokens_as_handles_are_wanted() -> None:
    store = TokenStore(1, 3)
    with pytest.raises(IndexError, match="2 handles for 1 tokens"):
        store.append(_ints(1, 2), _ints(1))
