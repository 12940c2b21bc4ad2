"""A calendar: the groups that are due at each step."""

from collections.abc import Collection

from scheduler_svc.core.sequences.sequence import SequenceGroup


class Calendar:
    """Groups by step; each is due at one step at most."""

    def __init__(self) -> None:
        self._due: dict[int, dict[str, SequenceGroup]] = {}
        self._steps: dict[str, int] = {}  # by request

    def __len__(self) -> int:
        return len(self._steps)

    def put(self, group: SequenceGroup, step: int) -> None:
        """Make a group due at this step, and at no other."""
        self.drop(group)
        self._due.setdefault(step, {})[group.request_id] = group
        self._steps[group.request_id] = step

    def drop(self, group: SequenceGroup) -> None:
        """Remove a group, if it is due at all."""
        step = self._steps.pop(group.request_id, None)
        if step is not None:
            due = self._due[step]
            del due[group.request_id]
            if not due:
                del self._due[step]

    def take(self, step: int) -> Collection[SequenceGroup]:
        """Remove and return the groups that are due at this step, in the order of ``put``."""
        due = self._due.pop(step, {})
        for request_id in due:
            del self._steps[request_id]
        return due.values()
