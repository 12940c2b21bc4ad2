"""What is too old in the log when epochs are short."""

import pytest

from scheduler_svc.history import History
from shared.bus.api import EntryId

# Epochs of 4, 1 and 10 entries.
HISTORY = History([EntryId(5, 3), EntryId(7, 0), EntryId(9, 9)])


@pytest.mark.parametrize(
    ("head_seq", "num_entries", "first_kept"),
    [
        (0, 1, EntryId(9, 10)),  # nothing of the epochs before
        (0, 2, EntryId(9, 9)),
        (2, 4, EntryId(9, 9)),
        (2, 13, EntryId(9, 0)),
        (2, 14, EntryId(7, 0)),
        (2, 15, EntryId(5, 3)),
        (2, 18, EntryId(5, 0)),
        (2, 19, None),  # there are no more entries
        (9, 9, None),  # enough is known by this epoch alone
    ],
)
def test_the_last_entries_are_kept_over_all_epochs(
    head_seq: int, num_entries: int, first_kept: EntryId | None
) -> None:
    assert HISTORY.trim_below(EntryId(11, head_seq), num_entries) == first_kept


def test_the_first_epoch_of_all_has_nothing_to_trim() -> None:
    assert History([]).trim_below(EntryId(1, 5), 100) is None
