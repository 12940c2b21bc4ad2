"""``scripts/explain REQUEST_ID``: a request's life, as its engine's logs tell it.

Reads the logs in Redis without changing anything, as far as they have not been trimmed, or a
recording (``--record FILE`` of the scheduler), which is replayed and so knows every preemption.
Shows lengths, never prompts or tokens.
"""

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from scheduler_svc.explain.log_sources import from_bus, from_recording
from scheduler_svc.explain.merged_logs import Logs, resolve, timeline_of
from scheduler_svc.explain.redis_location import find_redis
from scheduler_svc.explain.timeline import Timeline
from scheduler_svc.settings import SchedulerSettings
from shared.bus.redis_bus import RedisBus
from shared.errors import PageStreamError, SettingsError
from shared.settings import exit_with, load
from shared.state_folder import DEFAULT_PORT
from shared.version import version


def main() -> None:
    """Print the timeline; exits with 1 if there is none, with 2 on bad settings."""
    args = _parser().parse_args()
    flags = {} if args.engine_id is None else {"engine_id": args.engine_id}
    source = ""
    try:
        if args.recording is not None:
            logs = from_recording(args.recording)
        else:
            engine_id = load(SchedulerSettings, flags, os.environ).engine_id
            redis = find_redis(args.redis_url, args.state_dir, os.environ, args.port)
            source = f" (engine {engine_id}, Redis {redis})"
            logs = asyncio.run(_read(redis.url, engine_id))
        timeline = timeline_of(resolve(args.request_id, logs), logs)
    except SettingsError as error:
        exit_with(error)
    except (PageStreamError, OSError) as error:
        print(f"error: {error}{source}", file=sys.stderr)
        sys.exit(1)
    _show(as_json(timeline) if args.json else as_text(timeline))


def _show(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader has stopped; Python must not flush again at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def as_text(timeline: Timeline) -> str:
    """Lines for people, with times since the first event."""
    zero_ms = timeline.events[0].when.at_ms if timeline.events else 0
    lines = [f"request {timeline.request_id}"]
    for event in timeline.events:
        about = "~" if event.when.is_estimate else " "
        since_s = (event.when.at_ms - zero_ms) / 1e3
        lines.append(f"{about}{since_s:>+10.3f} s  {event.text}")
    lines.append(f"At the end of the logs: {timeline.status}.")
    if any(event.when.is_estimate for event in timeline.events):
        lines.append("~ not earlier than this; nothing that is left of the logs tells it exactly.")
    if timeline.unknown:
        lines += ["Not known:", *(f"  * {what}" for what in timeline.unknown)]
    return "\n".join(lines)


def as_json(timeline: Timeline) -> str:
    """One JSON map for programs; times are milliseconds since 1970."""
    value: dict[str, Any] = {
        "request_id": timeline.request_id,
        "status": timeline.status,
        "events": [
            {
                "kind": event.kind,
                "at_ms": event.when.at_ms,
                "is_estimate": event.when.is_estimate,
                "text": event.text,
                **event.facts,
            }
            for event in timeline.events
        ],
        "unknown": timeline.unknown,
    }
    return json.dumps(value, indent=2)


async def _read(redis_url: str, engine_id: str) -> Logs:
    bus = RedisBus.of_engine(redis_url, engine_id)
    try:
        return await from_bus(bus, engine_id)
    finally:
        await bus.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/explain", description=__doc__)
    parser.add_argument(
        "request_id",
        help="as clients see it (cmpl-..., chatcmpl-...), or how it begins if no other begins so",
    )
    parser.add_argument(
        "--redis-url", help="Redis to read; by default REDIS_URL, else that of scripts/serve"
    )
    parser.add_argument("--state-dir", help="as given to scripts/serve, whose Redis is to be read")
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help="of scripts/serve, whose Redis is to be read"
    )
    parser.add_argument("--engine-id", help="engine to read of; by default as the scheduler's")
    parser.add_argument("--recording", type=Path, help="read this file instead of Redis")
    parser.add_argument("--version", action="version", version=f"PageStream {version()}")
    parser.add_argument("--json", action="store_true", help="one JSON map instead of lines")
    return parser


if __name__ == "__main__":
    main()
