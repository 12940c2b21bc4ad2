"""Messages survive the wire, and nothing else does."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import messages
from shared.codec import Message, decode, decode_as, encode
from shared.errors import DecodeError
from shared.messages.leases import (
    PROTOCOL,
    EngineInfo,
    KVGeometry,
    ModelInfo,
    PrefixStatus,
    Speeds,
    WorkerInfo,
    decode_lease,
)
from shared.messages.logprobs import TokenLogprobs
from shared.messages.outputs import (
    BeamCandidates,
    BeamsEnded,
    ChoiceEnded,
    ChoiceState,
    Hypothesis,
    PromptLogprobs,
    RequestEnded,
    RequestState,
    StepResult,
)
from shared.messages.plans import Admission, BeamStep, EpochStarted, StepPlan, Tick
from shared.messages.prompts import Prompt
from shared.messages.requests import Abort, Attach, ChoiceView, Drain, GatewayLost, Pin, Stop
from shared.messages.routes import Routed
from shared.messages.snapshots import PoolSnapshot, RequestPhase, RequestSnapshot
from shared.sampling import BeamParams, EarlyStopping, TokenBias
from tests.support.requests import sampling, submit


def ints(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def floats(*values: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.array(values, np.float32)


MODEL = ModelInfo("demo", 4096, 2048, "bfloat16", (1, 2))
LOGPROBS = TokenLogprobs(0, -1.5, ints(4, 5), np.array([-0.5, -2.0], np.float32))
RESULT = StepResult(
    step=3,
    handles=ints(1, 2),
    tokens=ints(-1, 2**31 - 1),
    ended_rows=ints(1),
    ended_flags=ints(2),
    beams=(BeamCandidates(9, ints(0, 1), ints(7, 8), floats(-0.5, -1.5), ints(0, 1)),),
    logprobs=(LOGPROBS,),
    prompt_logprobs=(PromptLogprobs(9, (LOGPROBS,)),),
    admitted_handles=ints(9),
    admitted_computed=ints(16),
    num_batched_tokens=4,
    model_us=100,
    step_us=200,
)
IN_POOL = RequestSnapshot(
    *("a", "alice", RequestPhase.DECODE, 0, 1_700, 3, 20, 2, 0, 3, 4),
    *(ints(9), ints(3), ints(1), ints(5), ints(0), ints()),
)

MESSAGES: list[Message] = [
    submit("a", [1, 2, 3], stop_token_ids=(7, 8), num_logprobs=5),
    submit("a", num_choices=4, beams=BeamParams(4, 0.5, EarlyStopping.NEVER)),
    Stop("a", 0, 12),
    submit("a", repetition_penalty=1.1, logit_bias=(TokenBias(5, -100.0), TokenBias(0, 0.5))),
    Attach("a", "g", "x", None, (), exact=False),
    Attach("a", "g", "x", submit("a"), (ChoiceView(ints(7, 8), "stop"),), exact=True),
    GatewayLost("g"),
    Drain(7),
    Routed("gateway-1", "engine-0", bytes(range(16)), 40),
    Prompt("a", ints(1, 2, 3)),
    PoolSnapshot(
        *(7, "3-4", 64, 16, 8, 4_096, 32, 512, 1, "swap", 2),
        *((IN_POOL,), ints(6), ints(7), "{}"),
    ),
    Abort("a", "x", "disconnected"),
    Pin("p", "instructions", ints(1, 2, 3), "salt"),
    EpochStarted(7, "s", ("w0", "w1")),
    EpochStarted(8, "s", ("w0", "w1"), ints(3, 4)),
    StepPlan(
        step=3,
        now_ms=5,
        requests_cursor="1-2",
        outputs_cursor="3-4",
        outputs_min_id="0-0",
        retired=ints(4),
        beams=(BeamStep(9, ints(1, 2), floats(-0.5, -1.5), ints(1, 1), ints(7, 8)),),
        swap_out_device=ints(1),
        swap_out_host=ints(2),
        swap_in_host=ints(3),
        swap_in_device=ints(4),
        copy_sources=ints(1),
        copy_targets=ints(3),
        replaced_handles=ints(2),
        replaced_columns=ints(0),
        admissions=(Admission(9, 0, ints(1, 2), 2, 0, ints(5), sampling()),),
        fork_parents=ints(9),
        fork_children=ints(10),
        fork_choices=ints(1),
        grown_handles=ints(1, 2),
        grown_blocks=ints(8, 9),
        chunk_handles=ints(9),
        chunk_tokens=ints(2),
        idle_turns=(Tick(4, "1-1", "3-3"),),
    ),
    RESULT,
    RequestState(submit("b"), (ChoiceState(0, 4, ints(), ""),), "5-6"),
    RequestState(submit("b"), (ChoiceState(0, 4, ints(7), "stop", floats(-0.5)),), "5-6"),
    BeamsEnded("b", (Hypothesis(ints(7), floats(-0.5), -0.5, "stop"),), "5-6"),
    ChoiceEnded("b", 1, "stop", "5-6"),
    RequestEnded("b", "error", "no room", "5-6"),
    WorkerInfo("w", 0, "ready", "", MODEL, KVGeometry(10, 16, 4096, 4), Speeds(1.5, 2e9)),
    WorkerInfo("w", 0, "loading", "", None, None, None),
    EngineInfo("e", "s", 7, "ready", "", MODEL, None, 256, 1, 2, (PrefixStatus("p", "pinned", 4),)),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_the_wire(message: Message) -> None:
    found = decode(encode(message))
    assert type(found) is type(message)
    assert found == message
    assert hash(found) == hash(message)


def test_messages_that_differ_in_one_token_differ() -> None:
    assert submit("a", [1, 2]) != submit("a", [1, 3])
    assert submit("a") != Abort("a", "", "")


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
@given(data=st.data())
def test_damaged_bytes_are_a_decode_error_or_another_message(
    message: Message, data: st.DataObject
) -> None:
    raw = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    for damaged in (bytes(raw), bytes(raw[:cut])):
        try:
            found = decode(damaged)
        except DecodeError:
            continue
        assert decode(encode(found)) == found


@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_nothing_but_decode_errors(raw: bytes) -> None:
    with pytest.raises(DecodeError):
        decode(raw)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"t": "Sudo"}, "unknown message type 'Sudo'"),
        ({"t": 5}, "unknown message type 5"),
        ({"v": 99}, "version 99"),
        ({"choice": "0"}, "Stop.choice: expected int"),
        ({"choice": True}, "Stop.choice: expected int"),
    ],
)
def test_the_error_has_the_reason_and_the_request_id(
    change: dict[str, object], complaint: str
) -> None:
    data = msgpack.unpackb(encode(Stop("a", 0, 12)))
    with pytest.raises(DecodeError) as caught:
        decode(msgpack.packb({**data, **change}))
    assert complaint in str(caught.value)
    assert caught.value.request_id == "a"


def test_log_probabilities_travel_as_columns() -> None:
    top = (ints(4, 5), np.array([-0.5, -2.0], np.float32))
    none = (ints(), np.array([], np.float32))
    items = [TokenLogprobs(row, -row / 2, *(top if row % 3 else none)) for row in range(1_000)]
    found = decode(encode(replace(RESULT, logprobs=items)))
    assert isinstance(found, StepResult)
    assert [(item.row, item.logprob) for item in found.logprobs] == [
        (row, -row / 2) for row in range(1_000)
    ]
    assert [item.top_ids.tolist() for item in found.logprobs[:3]] == [[], [4, 5], [4, 5]]
    assert found.logprobs[-1].top_logprobs.tolist() == []
    num_numbers = 3 * 1_000 + 2 * 2 * 666
    assert len(encode(found)) - len(encode(replace(RESULT, logprobs=()))) < 4 * num_numbers + 100


@pytest.mark.parametrize(
    "change",
    [
        {"rows": b""},
        {"counts": b"\xff\xff\xff\xff"},
        {"counts": b"\x03\x00\x00\x00"},
        {"top_ids": b"\x00"},
        {"logprobs": 5},
    ],
)
def test_columns_that_do_not_go_together_are_a_decode_error(change: dict[str, object]) -> None:
    data = msgpack.unpackb(encode(replace(RESULT, logprobs=(LOGPROBS,))))
    data["logprobs"].update(change)
    with pytest.raises(DecodeError, match=r"StepResult\.logprobs: colum"):
        decode(msgpack.packb(data))


def test_fields_of_a_newer_version_are_ignored_on_every_level() -> None:
    state = RequestState(submit("a"), (), "0-0")
    data = msgpack.unpackb(encode(state))
    data["submit"]["sampling"]["newer"] = data["submit"]["newer"] = data["newer"] = [1, {"a": 2}]
    assert decode(msgpack.packb(data)) == state


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_no_message_of_a_newer_version_is_refused_for_its_fields(message: Message) -> None:
    def with_new_fields(value: object) -> object:
        match value:
            case dict():
                known = {name: with_new_fields(item) for name, item in value.items()}
                return {**known, "newer": {"a": [1, "b"]}}
            case list():
                return [with_new_fields(item) for item in value]
        return value

    newer = with_new_fields(msgpack.unpackb(encode(message)))
    assert newer != msgpack.unpackb(encode(message))
    assert decode(msgpack.packb(newer)) == message


def test_all_types_of_messages_are_tested_here() -> None:
    modules = Path(messages.__file__).parent.glob("[a-z]*.py")
    found = (vars(import_module(f"shared.messages.{path.stem}")).values() for path in modules)
    types = {one for module in found for one in module if isinstance(one, type)}
    assert {one for one in types if issubclass(one, Message)} - {Message} == {
        type(message) for message in MESSAGES
    }


def test_a_lease_of_another_protocol_is_refused_whatever_its_fields() -> None:
    engine = next(message for message in MESSAGES if isinstance(message, EngineInfo))
    data = msgpack.unpackb(encode(replace(engine, protocol=PROTOCOL + 1)))
    for change in ({}, {"v": 2}, {"model": [1]}, {"epoch": "seven"}):
        with pytest.raises(DecodeError, match=f"protocol {PROTOCOL + 1}, this process {PROTOCOL}"):
            decode_lease(EngineInfo, msgpack.packb({**data, **change}), "scheduler")
    data["protocol"] = PROTOCOL
    assert decode_lease(EngineInfo, msgpack.packb(data), "scheduler").epoch == 7
    with pytest.raises(DecodeError, match=r"lease of the scheduler cannot be read.*EngineInfo\.ep"):
        decode_lease(EngineInfo, msgpack.packb({**data, "epoch": "seven"}), "scheduler")
    del data["protocol"]
    with pytest.raises(DecodeError, match="protocol 1, this process"):
        decode_lease(EngineInfo, msgpack.packb(data), "scheduler")


def test_a_missing_field_is_named() -> None:
    data = msgpack.unpackb(encode(Stop("a", 0, 12)))
    del data["num_tokens"]
    with pytest.raises(DecodeError, match="'num_tokens' is missing"):
        decode(msgpack.packb(data))


def test_a_field_that_older_versions_do_not_send_has_its_default() -> None:
    data = msgpack.unpackb(encode(submit("a")))
    for name in ("tenant", "deadline_ms", "display"):
        del data[name]
    assert decode(msgpack.packb(data)) == submit("a")
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"):
        del data["sampling"][name]
    assert decode(msgpack.packb(data)) == submit("a")
    assert not submit("a").sampling.changes_logits


def test_arrays_must_be_whole_numbers_of_items() -> None:
    data = msgpack.unpackb(encode(submit("a")))
    data["prompt"] = b"\0\0\0"
    with pytest.raises(DecodeError, match=r"Submit\.prompt"):
        decode(msgpack.packb(data))


def test_a_key_holds_one_type_of_message() -> None:
    with pytest.raises(DecodeError, match="expected WorkerInfo, got Stop"):
        decode_as(WorkerInfo, encode(Stop("a", 0, 1)))
