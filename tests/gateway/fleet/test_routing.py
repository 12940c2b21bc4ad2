"""The choice of an engine: a pure function of the request and of what is known of engines."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gateway.fleet.prefix_index import BOUNDARIES, PrefixIndex, prefixes_of
from gateway.fleet.routing import Choice, EngineLoad, Reason, choose, mean_load
from shared.codec import IntArray


def tokens(count: int, first: int = 0) -> IntArray:
    return np.arange(first, first + count, dtype=np.int32)


def chosen(
    loads: dict[str, int], expected: dict[str, int], num_tokens: int = 100, request: int = 0
) -> Choice:
    engines = [EngineLoad(name, load) for name, load in loads.items()]
    by_name = {engine.name: engine for engine in engines}
    return choose(f"{request:032x}", num_tokens, expected, engines, mean_load(engines), by_name)


def test_a_cached_prefix_outweighs_a_little_load_and_not_a_lot() -> None:
    assert chosen({"a": 12, "b": 8}, {"a": 96}) == Choice("a", Reason.PREFIX, 96)
    assert chosen({"a": 100, "b": 8}, {"a": 20}) == Choice("b", Reason.LOAD)


def test_one_hot_engine_changes_nothing_for_prefixes_of_others() -> None:
    loads = {"hot": 1_000, "b": 10, "c": 9}
    assert chosen(loads, {"b": 90}).engine == "b"


def test_without_a_known_prefix_the_least_loaded_engine_is_chosen() -> None:
    assert chosen({"a": 3, "b": 2, "c": 9}, {}) == Choice("b", Reason.LOAD)
    assert chosen({"a": 3}, {}) == Choice("a", Reason.ONLY)


def test_of_many_engines_a_sample_is_drawn_by_the_request_alone() -> None:
    loads = {f"engine-{number}": number % 50 for number in range(1_000)}
    rng = np.random.default_rng(1)
    requests = [int.from_bytes(rng.bytes(16), "little") for _ in range(300)]
    found = [chosen(loads, {}, request=request).engine for request in requests]
    assert found == [chosen(loads, {}, request=request).engine for request in requests]
    assert len(set(found)) > 100
    # The least loaded of eight: far below the mean of 24.5.
    assert sum(loads[name] for name in found) / len(found) < 9
    assert chosen(loads, {"engine-4": 90}, request=requests[0]).engine == "engine-4"


@given(num_tokens=st.integers(0, 5_000), common=st.integers(0, 5_000))
def test_equal_beginnings_have_equal_names_and_no_others(num_tokens: int, common: int) -> None:
    common = min(common, num_tokens)
    one = prefixes_of(tokens(num_tokens), "alice", "")
    other = np.concatenate([tokens(common), tokens(num_tokens - common, first=10_000)])
    names = prefixes_of(other, "alice", "").hashes
    equal = sum(end <= common for end in BOUNDARIES[1:] if end <= num_tokens)
    assert one.hashes[:equal] == names[:equal]
    assert not set(one.hashes[equal:]) & set(names)
    assert not set(one.hashes) & set(prefixes_of(tokens(num_tokens), "bob", "").hashes)
    assert not set(one.hashes) & set(prefixes_of(tokens(num_tokens), "alice", "salt").hashes)


def test_the_longest_known_prefix_is_found_and_some_shorter_ones() -> None:
    index = PrefixIndex()
    system = tokens(512)
    for number in range(20):
        prompt = np.concatenate([system, tokens(256, 1_000 * number)])
        index.sent(prefixes_of(prompt, "", "").hashes, f"{number}")
    prompt = np.concatenate([system, tokens(256, 3_000), tokens(64, 7)])
    asked = prefixes_of(prompt, "", "")
    found = index.expected(asked)
    assert found["3"] == 768
    others = {name: length for name, length in found.items() if name != "3"}
    assert others
    assert all(128 <= length <= 512 for length in others.values())


def test_the_index_is_bounded_and_forgets_what_was_not_sent_for_longest() -> None:
    index = PrefixIndex(max_prefixes=100)
    for number in range(50):
        index.sent(prefixes_of(tokens(64, 1_000 * number), "", "").hashes, "a")
    assert len(index) <= 100
    assert index.expected(prefixes_of(tokens(64, 49_000), "", "")) == {"a": 64}
    assert index.expected(prefixes_of(tokens(64), "", "")) == {}
    counts = Counter(len(engines) for engines in index._engines.values())
    assert set(counts) == {1}
