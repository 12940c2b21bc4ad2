"""Conversations of several turns, and why fewer of their tokens are cached by a fleet."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.serving.http_stream import Target, ask

_CLIENTS = 12
_PATH = "/v1/completions"
_SYSTEM_WORDS, _TURN_WORDS = 120, 30


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of a conversation.

    Attributes:
        conversation: its number.
        number: of the turn in it, from 0.
        gateway: the number of the one that it came through.
        engine: that computed it; empty without a fleet.
    """

    conversation: int
    number: int
    gateway: int
    engine: str
    prompt_tokens: int
    cached_tokens: int


class Conversations:
    """Conversations whose turns repeat all before them, in the same order for the same seed.

    Args:
        ports: of the gateways, which turns use by turns.

    Attributes:
        turns: that were answered.
    """

    def __init__(self, count: int, num_turns: int, seed: int, ports: Sequence[int]) -> None:
        rng = random.Random(seed)
        self.turns: list[Turn] = []
        self._num_turns = num_turns
        self._targets = [Target.of(f"http://127.0.0.1:{port}", _PATH, None) for port in ports]
        systems = [_words(rng, _SYSTEM_WORDS) for _ in range(max(1, count // 10))]
        self._texts = [rng.choice(systems) for _ in range(count)]
        self._order = [index for index in range(count) for _ in range(num_turns)]
        rng.shuffle(self._order)
        self._asked = [[_words(rng, _TURN_WORDS) for _ in range(num_turns)] for _ in self._texts]
        self._locks = [asyncio.Lock() for _ in self._texts]
        self._num_sent = 0

    async def run(self) -> list[Turn]:
        """Run all of them; a few at once, and the turns of one in order.

        Raises:
            StreamFailed: a turn was not answered.
        """
        waiting = iter(self._order)

        async def client() -> None:
            for index in waiting:
                async with self._locks[index]:
                    await self._turn(index)

        await asyncio.gather(*(client() for _ in range(_CLIENTS)))
        return self.turns

    async def _turn(self, index: int) -> None:
        number = self._num_turns - len(self._asked[index])
        self._texts[index] += self._asked[index].pop()
        self._num_sent += 1
        gateway = self._num_sent % len(self._targets)
        body = {"model": "demo", "prompt": self._texts[index], "max_tokens": 32, "temperature": 0}
        answer = await ask(self._targets[gateway], {**body, "ignore_eos": True})
        found = json.loads(answer.body)
        self._texts[index] += found["choices"][0]["text"]
        usage = found["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        engine = answer.engine.partition(";")[0]
        self.turns.append(Turn(index, number, gateway, engine, usage["prompt_tokens"], cached))


def _words(rng: random.Random, count: int) -> str:
    return "".join(f" {rng.choice('abcdefgh')}{rng.randrange(100)}" for _ in range(count))


@dataclass(frozen=True, slots=True)
class Loss:
    """Tokens that one engine had cached, and a fleet had not."""

    why: str
    num_turns: int
    num_tokens: int


def losses(one: Sequence[Turn], fleet: Sequence[Turn]) -> list[Loss]:
    """Compares each turn in a fleet with the same one in one engine.

    Args:
        one: turns of one engine.
        fleet: the same turns of a fleet, in the order in which they were answered.
    """
    cached = {(turn.conversation, turn.number): turn.cached_tokens for turn in one}
    before: dict[int, Turn] = {}
    num_turns: Counter[str] = Counter()
    num_tokens: Counter[str] = Counter()
    for turn in fleet:
        why = _kind(before.get(turn.conversation), turn)
        num_turns[why] += 1
        num_tokens[why] += cached[turn.conversation, turn.number] - turn.cached_tokens
        before[turn.conversation] = turn
    return [Loss(why, count, num_tokens[why]) for why, count in sorted(num_turns.items())]


def _kind(before: Turn | None, turn: Turn) -> str:
    if before is None:
        return "first turn"
    if before.engine == turn.engine:
        return "the engine of the turn before"
    if before.gateway == turn.gateway:
        return "another engine, the same gateway"
    return "another engine, another gateway"
