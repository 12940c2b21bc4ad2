"""Measures the parts of a step's time on a running system over HTTP.

    scripts/serve &
    python -m benchmarks.serving.step_parts --concurrency 1,16,64 [--json]

Sends streams of 128 prompt tokens that generate 128 tokens, and reads the services' own metrics
before and after. All figures are means per step, in milliseconds, except where a unit is named.
"""

import argparse
import asyncio
import json
import sys
import time
from dataclasses import dataclass

import httpx

_PROMPT_TOKENS = 128
_NEW_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The addresses of the services."""

    gateway: str
    scheduler: str
    worker: str


class Snapshot:
    """Sums of all samples of each metric of the three services at one time."""

    def __init__(self, values: dict[str, float]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> float:
        return self._values[name]

    @staticmethod
    async def take(client: httpx.AsyncClient, endpoints: Endpoints) -> "Snapshot":
        """Scrape all three services; process metrics get the service's name as a prefix."""
        values: dict[str, float] = {}
        for service in ("gateway", "scheduler", "worker"):
            text = (await client.get(getattr(endpoints, service) + "/metrics")).text
            for line in text.splitlines():
                if not line.startswith("#"):
                    name, _, value = line.rpartition(" ")
                    name = name.partition("{")[0]
                    key = f"{service}:{name}" if name.startswith("process_") else name
                    values[key] = values.get(key, 0.0) + float(value)
        return Snapshot(values)


async def stream(client: httpx.AsyncClient, url: str, model: str, number: int) -> tuple[float, int]:
    """Run one stream; seconds to its first token, and number of received tokens."""
    body = {
        "model": model,
        "prompt": [4 + (number * 131 + index) % 2000 for index in range(_PROMPT_TOKENS)],
        "max_tokens": _NEW_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.perf_counter()
    first_s, tokens = 0.0, 0
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                first_s = first_s or time.perf_counter() - began
                usage = json.loads(line[6:]).get("usage")
                tokens = usage["completion_tokens"] if usage else tokens
    return first_s, tokens


async def measure(endpoints: Endpoints, concurrency: int) -> dict[str, float]:
    """Means per step while ``concurrency`` streams run."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:
        model = (await client.get(endpoints.gateway + "/v1/models")).json()["data"][0]["id"]
        await stream(client, endpoints.gateway, model, 0)
        before = await Snapshot.take(client, endpoints)
        began = time.perf_counter()
        found = await asyncio.gather(
            *(stream(client, endpoints.gateway, model, number) for number in range(concurrency))
        )
        wall_s = time.perf_counter() - began
        after = await Snapshot.take(client, endpoints)
    num_tokens = sum(tokens for _, tokens in found)
    assert num_tokens == concurrency * _NEW_TOKENS, "every stream must be complete"

    def mean_ms(name: str) -> float:
        total = after[f"pagestream:{name}_sum"] - before[f"pagestream:{name}_sum"]
        count = after[f"pagestream:{name}_count"] - before[f"pagestream:{name}_count"]
        return 1_000 * total / count

    def cpu_us_per_token(service: str) -> float:
        name = f"{service}:process_cpu_seconds_total"
        return 1e6 * (after[name] - before[name]) / num_tokens

    num_steps = after["pagestream:worker_steps_total"] - before["pagestream:worker_steps_total"]
    return {
        "steps": num_steps,
        "step_wall": 1_000 * wall_s / num_steps,
        "worker_step": mean_ms("worker_step_seconds"),
        "worker_model": mean_ms("worker_model_seconds"),
        "worker_sample": mean_ms("worker_sample_seconds"),
        "worker_wait": mean_ms("worker_wait_seconds"),
        "worker_loop_overhead": mean_ms("worker_loop_overhead_seconds"),
        "scheduler_turn": mean_ms("scheduler_step_seconds"),
        "plan_round_trip": mean_ms("plan_round_trip_seconds"),
        "gateway_cpu_us_per_token": cpu_us_per_token("gateway"),
        "scheduler_cpu_us_per_token": cpu_us_per_token("scheduler"),
        "worker_cpu_us_per_token": cpu_us_per_token("worker"),
        "tokens_per_s": num_tokens / wall_s,
        "median_ttft": 1_000 * sorted(first for first, _ in found)[concurrency // 2],
    }


def main() -> None:
    """Measure each concurrency and print one table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the gateway")
    parser.add_argument("--scheduler", default="http://127.0.0.1:9101", help="its metrics")
    parser.add_argument("--worker", default="http://127.0.0.1:9102", help="its metrics")
    parser.add_argument("--concurrency", default="1,16,64", help="numbers of streams")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    endpoints = Endpoints(args.url, args.scheduler, args.worker)
    found = {}
    for concurrency in map(int, args.concurrency.split(",")):
        print(f"{concurrency} streams ...", file=sys.stderr)
        found[str(concurrency)] = asyncio.run(measure(endpoints, concurrency))
    if args.json:
        print(json.dumps(found))
        return
    print(f"{'milliseconds per step':<30}" + "".join(f"{name:>12}" for name in found))
    for row in next(iter(found.values())):
        print(f"{row:<30}" + "".join(f"{values[row]:>12.3f}" for values in found.values()))


if __name__ == "__main__":
    main()
