"""What is too old in the log when epochs are short."""

import pytest

from scheduler_svc.outputs.history import History
from shared.bus.api import EntryId

# Epochs of 4, 1 and 10 entries; the single one is large.
ENTRIES = [
    *((EntryId(5, seq), 10) for seq in range(4)),
    (EntryId(7, 0), 1_000),
    *((EntryId(9, seq), 10) for seq in range(10)),
]
HISTORY = History(ENTRIES)
ANY_BYTES = 10_000


@pytest.mark.parametrize(
    ("head_seq", "num_entries", "first_kept"),
    [
        (0, 1, EntryId(9, 10)),  # nothing of the epochs before
        (0, 2, EntryId(9, 9)),
        (2, 4, EntryId(9, 9)),
        (2, 13, EntryId(9, 0)),
        (2, 14, EntryId(7, 0)),
        (2, 15, EntryId(5, 3)),
        (2, 17, EntryId(5, 1)),
        (2, 19, None),  # there are no more entries
        (9, 9, None),  # enough is known by this epoch alone
    ],
)
def test_the_last_entries_are_kept_over_all_epochs(
    head_seq: int, num_entries: int, first_kept: EntryId | None
) -> None:
    assert HISTORY.trim_below(EntryId(11, head_seq), num_entries, ANY_BYTES) == first_kept


@pytest.mark.parametrize(
    ("bytes_left", "first_kept"),
    [
        (-1, None),  # this epoch alone has enough
        (0, EntryId(9, 10)),
        (9, EntryId(9, 10)),
        (10, EntryId(9, 9)),
        (105, EntryId(9, 0)),
        (1_099, EntryId(9, 0)),
        (1_100, EntryId(7, 0)),
        (1_139, EntryId(5, 1)),
        (1_140, None),
    ],
)
def test_no_more_is_kept_than_has_so_many_bytes(
    bytes_left: int, first_kept: EntryId | None
) -> None:
    assert HISTORY.trim_below(EntryId(11, 0), 100, bytes_left) == first_kept


def test_the_first_epoch_of_all_has_nothing_to_trim() -> None:
    assert History([]).trim_below(EntryId(1, 5), 100, ANY_BYTES) is None
    assert History([]).trim_below(EntryId(1, 5), 6, 0) is None
