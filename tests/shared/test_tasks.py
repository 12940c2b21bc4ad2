"""Tasks that must end do, also those that miss a cancellation."""

import asyncio

import pytest

from shared import tasks


@pytest.fixture(autouse=True)
def _again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_REPEAT_S", 0.01)


async def _deaf(num_missed: int) -> None:
    """Goes on after so many cancellations."""
    for _ in range(num_missed):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue
    await asyncio.Event().wait()


async def _fails() -> None:
    raise ValueError("broken")


@pytest.mark.parametrize("num_missed", [0, 1, 3])
async def test_a_task_that_missed_a_cancellation_is_cancelled_again(num_missed: int) -> None:
    task = asyncio.create_task(_deaf(num_missed))
    await asyncio.sleep(0)
    await tasks.cancel_until_done(task)
    assert task.cancelled()


async def test_the_errors_of_tasks_that_are_ended_stay_in_them() -> None:
    task = asyncio.create_task(_fails())
    await tasks.cancel_until_done(task)
    await asyncio.sleep(0)
    task = asyncio.create_task(_fails())
    await asyncio.sleep(0)
    await tasks.cancel_until_done(task)
    assert isinstance(task.exception(), ValueError)


async def test_members_end_with_the_first_that_fails() -> None:
    with pytest.raises(ValueError, match="broken"):
        await tasks.run_together(_deaf(2), _fails())
    assert len(asyncio.all_tasks()) == 1


async def test_members_end_with_their_caller() -> None:
    running = asyncio.create_task(tasks.run_together(_deaf(2), _deaf(0)))
    while len(asyncio.all_tasks()) < 4:  # this one, the caller and two members
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(asyncio.all_tasks()) == 1
