"""A process that attacks gateways for a while: ``python -m tests.chaos.hostile --ports 8000 8001``.

It runs at the lowest priority. API keys are read from the variables ``HOSTILE_KEY`` and
``HONEST_KEY``; the latter is for clients that are only unusual. It prints one line of JSON for each
attempt.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Sequence

from tests.chaos.hostile.attacker import UNFINISHED, Answer, Attack, Attacker
from tests.chaos.hostile.catalogue import ATTACKS

_NICENESS = 19
_HOSTILE_ADDRESS, _HONEST_ADDRESS = "127.0.0.66", "127.0.0.1"


async def attack(attacks: Sequence[Attack], ports: Sequence[int], seed: int) -> None:
    """Attack until cancelled."""
    hostile_key, honest_key = os.environ.get("HOSTILE_KEY", ""), os.environ.get("HONEST_KEY", "")
    async with asyncio.TaskGroup() as lanes:
        for one in attacks:
            key = honest_key if one.is_honest else hostile_key
            address = _HONEST_ADDRESS if one.is_honest else _HOSTILE_ADDRESS
            for lane in range(one.lanes):
                draw = random.Random(f"{seed}/{one.name}/{lane}")
                lanes.create_task(
                    _attempt_until_cancelled(one, Attacker(ports, key, address, draw))
                )


async def _attempt_until_cancelled(attack: Attack, attacker: Attacker) -> None:
    await asyncio.sleep(attacker.draw.uniform(0, attack.every_s))
    while True:
        began_s, answer = time.monotonic(), Answer(UNFINISHED)
        try:
            answer = await attack.attempt(attacker)
        finally:
            attempt = [attack.name, began_s, time.monotonic(), answer.status, answer.text]
            print(json.dumps(attempt), flush=True)
        await asyncio.sleep(attack.every_s * attacker.draw.uniform(0.5, 1.5))


def chosen(names: Sequence[str]) -> Sequence[Attack]:
    """The attacks with one of these words in their names; all for none.

    Raises:
        ValueError: a word is in no name.
    """
    for name in names:
        if not any(name in attack.name for attack in ATTACKS):
            raise ValueError(f"{name!r} is in the name of no attack")
    return [one for one in ATTACKS if not names or any(name in one.name for name in names)]


async def _run(options: argparse.Namespace) -> None:
    attacks = chosen(options.attacks)
    try:
        async with asyncio.timeout(options.seconds):
            await attack(attacks, options.ports, options.seed)
    except TimeoutError:
        return


def main() -> int:
    """Attack until the time is over."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.hostile", description=__doc__)
    parser.add_argument("--ports", type=int, nargs="+", required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--attacks", nargs="*", default=[], help="those with such a word in theirs")
    options = parser.parse_args()
    os.nice(_NICENESS)
    asyncio.run(_run(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
