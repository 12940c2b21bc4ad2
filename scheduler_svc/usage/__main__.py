"""``scripts/usage``: what each API key used, added up from the logs of engines.

Reads the outputs logs in Redis without changing anything, as far as they have not been trimmed, or
recordings (``--record FILE`` of the scheduler), which hold all since their start. Requests count
from their acceptance, tokens when they are computed or sampled.
"""

import argparse
import asyncio
import json
import os
import sys
from collections import defaultdict
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from scheduler_svc.explain.log_sources import from_bus, from_recording
from scheduler_svc.explain.merged_logs import Logs
from scheduler_svc.explain.redis_location import find_redis
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.usage.ledger import Ledger, Usage
from shared.bus.redis_bus import RedisBus
from shared.errors import PageStreamError, SettingsError
from shared.settings import exit_with, load
from shared.state_folder import DEFAULT_PORT
from shared.version import version

_NO_KEY = "(no key)"


def main() -> None:
    """Print a table; exits with 1 if the logs cannot be read, with 2 on bad settings."""
    args = _parser().parse_args()
    flags = {} if args.engine_id is None else {"engine_id": args.engine_id}
    source = ""
    try:
        if args.recording:
            all_logs = [from_recording(path) for path in args.recording]
        else:
            engine_id = load(SchedulerSettings, flags, os.environ).engine_id
            redis = find_redis(args.redis_url, args.state_dir, os.environ, args.port)
            source = f" (engine {engine_id}, Redis {redis})"
            all_logs = [asyncio.run(_read(redis.url, engine_id))]
    except SettingsError as error:
        exit_with(error)
    except (PageStreamError, OSError) as error:
        print(f"error: {error}{source}", file=sys.stderr)
        sys.exit(1)
    usage, unknown = add_up(all_logs)
    print(as_json(usage, unknown) if args.json else as_text(usage, unknown))


def add_up(all_logs: list[Logs]) -> tuple[dict[str, Usage], list[str]]:
    """Usage by tenant, and what it leaves out."""
    by_tenant: defaultdict[str, Usage] = defaultdict(Usage)
    unknown: list[str] = []
    for logs in all_logs:
        ledger = Ledger(logs.block_size)
        ledger.read(logs.outputs)
        for tenant, usage in ledger.by_tenant.items():
            by_tenant[tenant].add(usage)
        unknown += [what for what in logs.unknown if "outputs" in what]
        if logs.block_size is None:
            unknown.append("block-seconds: the engine has no lease, so its block size is unknown")
        if ledger.num_unknown_prompts:
            what = f"tokens of {ledger.num_unknown_prompts} admissions"
            unknown.append(f"{what}: the log has lost the prompt")
        if ledger.num_gaps:
            unknown.append(f"what {ledger.num_gaps} missing or damaged entries contained")
    return dict(sorted(by_tenant.items())), unknown


def as_text(by_tenant: dict[str, Usage], unknown: list[str]) -> str:
    """A table with a line for each key and one for all."""
    total = Usage()
    for usage in by_tenant.values():
        total.add(usage)
    columns = [field.name for field in fields(Usage)]
    rows = [["key", *(name.replace("_", "-") for name in columns)]]
    for name, usage in [*by_tenant.items(), ("all", total)]:
        values = [getattr(usage, column) for column in columns]
        rows.append([name or _NO_KEY, *(_number(value) for value in values)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    ]
    if unknown:
        lines += ["Not counted:", *(f"  * {what}" for what in unknown)]
    return "\n".join(lines)


def as_json(by_tenant: dict[str, Usage], unknown: list[str]) -> str:
    """One JSON map for programs; the key "" is that of requests without an API key."""
    value: dict[str, Any] = {
        "keys": {tenant: asdict(usage) for tenant, usage in by_tenant.items()},
        "not_counted": unknown,
    }
    return json.dumps(value, indent=2)


def _number(value: int | float) -> str:
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"


async def _read(redis_url: str, engine_id: str) -> Logs:
    bus = RedisBus.of_engine(redis_url, engine_id)
    try:
        return await from_bus(bus, engine_id)
    finally:
        await bus.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/usage",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--redis-url", help="Redis to read; by default REDIS_URL, else that of scripts/serve"
    )
    parser.add_argument("--state-dir", help="as given to scripts/serve, whose Redis is to be read")
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help="of scripts/serve, whose Redis is to be read"
    )
    parser.add_argument("--engine-id", help="engine to read of; by default as the scheduler's")
    parser.add_argument(
        "--recording",
        type=Path,
        nargs="+",
        help="read these files, of one engine or several, instead of Redis",
    )
    parser.add_argument("--version", action="version", version=f"PageStream {version()}")
    parser.add_argument("--json", action="store_true", help="one JSON map instead of a table")
    return parser


if __name__ == "__main__":
    main()
