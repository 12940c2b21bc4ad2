"""Positions in the outputs log: what follows, what is passed, where something is missing."""

from shared.bus.api import EntryId
from shared.outputs_log.position import Continuity, LogPosition


def test_an_epoch_that_is_awaited_may_have_lost_its_start_by_trimming() -> None:
    position = LogPosition()
    position.start_epoch(6, "")
    position.read(EntryId(6, 1))
    position.server_restarted(EntryId(6, 0))
    assert position.enter(6) is Continuity.PASSED
    assert position.enter(7) is Continuity.GAP
    assert position.enter(7) is Continuity.FOLLOWS


def test_what_is_left_of_an_epoch_may_be_lost_by_a_second_restart() -> None:
    position = LogPosition()
    position.start_epoch(6, "")
    position.read(EntryId(6, 3))
    position.server_restarted(EntryId(6, 1))
    position.server_restarted(EntryId(0, 0))
    assert position.start_epoch(5, "")
    assert position.enter(5) is Continuity.FOLLOWS


def test_an_epoch_with_a_lower_number_may_be_there_already_without_its_start() -> None:
    position = LogPosition()
    position.start_epoch(6, "")
    position.read(EntryId(6, 1))
    position.server_restarted(EntryId(4, 9))
    position.read(EntryId(4, 7))
    assert position.enter(4) is not Continuity.PASSED


def test_an_epoch_may_have_the_number_of_a_lost_one() -> None:
    position = LogPosition()
    position.start_epoch(6, "lost")
    position.read(EntryId(6, 2))
    position.server_restarted(EntryId(6, 1))
    assert not position.start_epoch(6, "lost")
    assert position.enter(6) is Continuity.PASSED
    assert position.start_epoch(6, "another")
    assert position.enter(6) is Continuity.FOLLOWS
    assert position.take_step(1) is Continuity.FOLLOWS


def test_after_a_restart_no_result_follows_those_before_it() -> None:
    position = LogPosition()
    position.start_epoch(6, "")
    position.take_step(1)
    position.server_restarted(EntryId(6, 9))
    assert position.take_step(2) is Continuity.GAP
