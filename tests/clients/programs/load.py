"""guidellm: a small load of completions and chats."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def _benchmark(server: Any, path: str, **backend: Any) -> None:
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "report.json"
        parts = {
            "backend": {
                "kind": "openai_http",
                "target": server.url,
                "model": server.model,
                "request_format": path,
                **backend,
            },
            "profile": {"kind": "concurrent", "streams": 2},
            "constraint": {"kind": "max_requests", "count": 6},
            "tokenizer": {"kind": "hf_auto", "model": server.tokenizer},
            "data": {"kind": "synthetic_text", "prompt_tokens": 32, "output_tokens": 16},
            "output": {"kind": "json", "path": out},
        }
        command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-progress"]
        for option, fields in parts.items():
            text = ",".join(f"{key}={value}" for key, value in fields.items())
            command += [f"--{option}", text]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        print(done.stdout, done.stderr, sep="\n")
        lines = done.stderr.strip().splitlines() or ["no output"]
        assert done.returncode == 0, lines[-1]
        [benchmark] = json.loads(out.read_text())["benchmarks"]
        state = benchmark["scheduler_state"]
        print(state)
        assert state["successful_requests"] == 6, state


def completions(server: Any) -> None:
    """run, /v1/completions"""
    _benchmark(server, "/v1/completions")


def chats(server: Any) -> None:
    """run, /v1/chat/completions"""
    _benchmark(server, "/v1/chat/completions")


def responses(server: Any) -> None:
    """responses.create by run, /v1/responses"""
    _benchmark(server, "/v1/responses")
