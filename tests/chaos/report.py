"""The results of runs as a table, and failures in full."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.chaos.client import Outcome
from tests.chaos.scenario import Run

FAILED, OUT_OF_TIME = 1, 3
_SHOWN_DISRUPTIONS = 40
HEAD = (
    "| scenario | complete | equal texts | duplicates | gaps | disruptions | resumed | pause p50 "
    "| p99 | with spawner p50 | p99 | time |\n|---|---|---|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        equal: complete texts that equal those of the undisturbed run.
        pauses_s: ascending, around disruptions to services.
        spawner_pauses_s: around disruptions to services with their spawners.
    """

    name: str
    total: int
    complete: int
    equal: int
    duplicates: int
    gaps: int
    disruptions: int
    resumed: int
    pauses_s: Sequence[float]
    spawner_pauses_s: Sequence[float]
    time_s: float

    @property
    def was_asked(self) -> bool:
        """Whether there was time for at least one request; without any, there is no result."""
        return self.total > 0

    def is_good(self, exact: bool) -> bool:
        """Whether nothing was lost, repeated or, if texts must be equal, changed."""
        same = self.equal == self.total or not exact
        return self.complete == self.total and same and not self.duplicates and not self.gaps

    def __str__(self) -> str:
        pauses = " | ".join(
            _at(found, share)
            for found in (self.pauses_s, self.spawner_pauses_s)
            for share in (0.5, 0.99)
        )
        return (
            f"| {self.name} | {self.complete}/{self.total} | {self.equal} | {self.duplicates} "
            f"| {self.gaps} | {self.disruptions} | {self.resumed} | {pauses} "
            f"| {self.time_s:.0f} s |"
        )


def verdict(rows: Sequence[Row], num_scenarios: int, exact: bool) -> tuple[int, str]:
    """Exit code of all runs and its meaning, with runs that there was no time for.

    Args:
        num_scenarios: that were to run.
        exact: whether texts must be those of the undisturbed run.
    """
    bad = [row.name for row in rows if not row.is_good(exact)]
    if bad:
        return FAILED, f"something was lost, repeated or changed: {', '.join(bad)}"
    num_run = sum(row.was_asked for row in rows)
    if num_run < num_scenarios:
        return OUT_OF_TIME, (
            f"all is well as far as it went; --minutes left no time for {num_scenarios - num_run} "
            f"of {num_scenarios} runs"
        )
    return 0, "all is well"


def row_of(name: str, run: Run, expected: Mapping[str, Outcome]) -> Row:
    """The row of a run."""
    outcomes = run.outcomes
    return Row(
        name=name,
        total=run.num_begun,
        complete=run.num_complete,
        equal=sum(is_equal(outcome, expected) for outcome in outcomes.values()),
        duplicates=sum(outcome.num_duplicates for outcome in outcomes.values()),
        gaps=sum(outcome.num_gaps for outcome in outcomes.values()),
        disruptions=len(run.disruptions),
        resumed=sum(outcome.num_resumed for outcome in outcomes.values()),
        pauses_s=run.pauses_s(with_spawner=False),
        spawner_pauses_s=run.pauses_s(with_spawner=True),
        time_s=run.time_s,
    )


def is_equal(outcome: Outcome, expected: Mapping[str, Outcome]) -> bool:
    """Whether an answer is complete and equals that of the undisturbed run."""
    other = expected[outcome.ask.key]
    return outcome.is_complete and _plain(outcome) == _plain(other)


def failures(run: Run, expected: Mapping[str, Outcome], deaths: Sequence[str]) -> list[str]:
    """Descriptions of all wrong answers."""
    lines = [f"process ended by itself: {death}" for death in deaths]
    for outcome in run.outcomes.values():
        faults = _faults(outcome, expected)
        if faults:
            body = {k: v for k, v in outcome.ask.body.items() if k != "prompt"}
            times = outcome.arrivals_s
            lines += ["", f"{outcome.ask.key} id={outcome.request_id} {body}"]
            lines += [f"  sent at {times[0]:.2f}, last token at {times[-1]:.2f}"]
            lines += [f"  {line}" for line in [*faults, *outcome.problems]]
            disruptions = [
                disruption
                for disruption in run.disruptions
                if times[0] - 1 < disruption.at_s < times[-1] + 60
            ]
            lines += [
                f"  disruption: {disruption}" for disruption in disruptions[:_SHOWN_DISRUPTIONS]
            ]
    return lines


def _faults(outcome: Outcome, expected: Mapping[str, Outcome]) -> list[str]:
    faults = []
    if outcome.why is not None:
        faults.append(f"incomplete: {outcome.why}")
    elif not outcome.is_complete:
        faults.append("incomplete: interrupted")
    if outcome.num_duplicates or outcome.num_gaps:
        faults.append(f"{outcome.num_duplicates} duplicates, {outcome.num_gaps} gaps")
    other = expected.get(outcome.ask.key)
    if other is not None and outcome.is_complete:
        for index, pair in enumerate(zip(outcome.choices, other.choices, strict=True)):
            mine, theirs = (choice.plain() for choice in pair)
            if mine != theirs:
                faults += [f"choice {index} has {mine}", f"  instead of {theirs}"]
    return faults


def _plain(outcome: Outcome) -> list[tuple[str, str, tuple[int, ...], str | None]]:
    return [choice.plain() for choice in outcome.choices]


def _at(ordered: Sequence[float], share: float) -> str:
    if not ordered:
        return "–"
    return f"{ordered[min(len(ordered) - 1, int(share * len(ordered)))]:.2f} s"
