"""Asks a running gateway everything that its OpenAPI description allows, and much that it does not.

    python -m tests.gateway.api_fuzzer URL [options of schemathesis run]

schemathesis makes the requests and compares each answer with the description: its status, its
content type, its schema, and that nothing but 503 is the server's own fault. Random names of models
would all be refused, so the one that is served takes their place, and answers are kept short.
Streams are read to their end, and those that can be resumed are resumed.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import schemathesis
from schemathesis import cli
from schemathesis.core.transport import Response
from schemathesis.generation import GenerationMode

MODEL = "demo"
_LIMITS = {"max_tokens": 6, "max_completion_tokens": 6, "min_tokens": 6, "n": 3, "best_of": 3}
_CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_headers_conformance", "response_schema_conformance", "negative_data_rejection"),
    *("unsupported_method", "allow_header_conformance", "ignored_auth"),
)
_DONE = "[DONE]"
_ENDS = ("response.completed", "response.incomplete", "response.failed", "error", "message_stop")
_OWN_LIMITS = {"/v1/responses": "max_output_tokens", "/v1/messages": "max_tokens"}
_PATIENCE_S = 60.0  # whatever is silent for longer hangs


class StreamIsBroken(AssertionError):
    """Not what a client of Server-Sent Events can read, or without an end."""


class _Hooks:
    """Changes requests, and reads streams.

    Attributes:
        resumable: URLs of streams with ids of their events, the newest last.
    """

    def __init__(self) -> None:
        self.resumable: list[tuple[str, str]] = []
        self._turn = 0

    def change(self, case: schemathesis.Case[Any]) -> None:
        """Make a request cheap, or one that can succeed."""
        if isinstance(case.body, dict):
            self._make_short(case.body, case.path)
        is_stream = case.path == "/v1/streams/{stream_id}"
        if is_stream and self.resumable and _mode(case) is GenerationMode.POSITIVE:
            self._turn += 1
            url, event_id = self.resumable[self._turn % len(self.resumable)]
            case.path_parameters = {"stream_id": url.rpartition("/")[2]}
            if self._turn % 2:
                case.headers["Last-Event-ID"] = event_id

    def read(self, response: Response) -> None:
        """Look at a stream.

        Raises:
            StreamIsBroken: it is none.
        """
        if "text/event-stream" not in str(response.headers.get("content-type")):
            return
        if not response.content and "starting_after" in str(response.request.url):
            return  # there is nothing after that event
        ids = list(read_events(response.content.decode("ascii")))
        [url] = response.headers.get("x-stream-url", [""])
        if url and ids:
            self.resumable = [*self.resumable[-40:], (url, ids[len(ids) // 2])]

    @staticmethod
    def _make_short(body: dict[str, Any], path: str) -> None:
        if isinstance(body.get("model"), str):
            body["model"] = MODEL
        own = _OWN_LIMITS.get(path)
        if own is not None:
            body[own] = _LIMITS["max_tokens"]
            return
        if body.get("max_tokens") is None and body.get("max_completion_tokens") is None:
            body["max_tokens"] = _LIMITS["max_tokens"]
        if body.get("stream") is True and body.get("stream_resume") is None:
            body["stream_resume"] = True
        for name, limit in _LIMITS.items():
            value = body.get(name)
            if type(value) is int and value > limit:
                body[name] = limit


def read_events(text: str) -> Iterator[str]:
    """Ids of the events of a stream that ended as it should, "" for those without.

    Raises:
        StreamIsBroken: it is none.
    """
    *blocks, rest = text.split("\n\n")
    last = ""
    for block in blocks:
        fields = dict(line.partition(": ")[::2] for line in block.split("\n"))
        if rest or not {"data"} <= fields.keys() <= {"id", "event", "data"}:
            raise StreamIsBroken(f"no event: {block[:200]!r}")
        last = fields["data"]
        kind = None if last == _DONE else json.loads(last).get("type")
        if kind != fields.get("event"):
            raise StreamIsBroken(f"another name: {block[:200]!r}")
        yield fields.get("id", "")
    if last == _DONE:
        return
    end = json.loads(last or "{}")
    if "error" not in end and end.get("type") not in _ENDS:
        raise StreamIsBroken(f"the stream ended with {last[:200]!r}")


def _begin_stream(url: str) -> tuple[str, str]:
    """A stream that can be resumed, from its middle: random bodies seldom ask for one."""
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 6, "ignore_eos": True}
    body |= {"stream": True, "stream_resume": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=_PATIENCE_S)
    ids = list(read_events(answer.raise_for_status().text))
    return answer.headers["x-stream-url"], ids[len(ids) // 2]


def _mode(case: schemathesis.Case[Any]) -> GenerationMode | None:
    return None if case.meta is None else case.meta.generation.mode


def main() -> None:
    """Exits with 0 if there was nothing to find."""
    url, *options = sys.argv[1:]
    hooks = _Hooks()
    hooks.resumable.append(_begin_stream(url))

    @schemathesis.hook
    def before_call(context: Any, case: schemathesis.Case[Any], kwargs: Any) -> None:
        hooks.change(case)

    @schemathesis.hook
    def after_call(context: Any, case: schemathesis.Case[Any], response: Response) -> None:
        hooks.read(response)

    os.environ["SCHEMATHESIS_DISABLE_TELEMETRY"] = "1"
    checks = ",".join(_CHECKS)
    config = Path(__file__).with_name("schemathesis.toml")
    arguments = ["--config-file", str(config), "run", f"{url}/openapi.json"]
    arguments += ["--checks", checks, "--no-color"]
    arguments += ["--request-timeout", str(_PATIENCE_S), *options]
    cli.schemathesis(arguments, prog_name="schemathesis")


if __name__ == "__main__":
    main()
