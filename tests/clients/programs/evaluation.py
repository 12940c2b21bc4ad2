"""lm-eval: likelihoods by completions, generated texts by completions and chats."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

DOCUMENTS = [
    {"question": "It was a dark", "options": ["night", "xqzw"], "right": 0},
    {"question": "Once upon a", "options": ["zzkq", "time"], "right": 1},
    {"question": "Good", "options": ["morning", "vvvv"], "right": 0},
]
CHOICE = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: options
doc_to_target: right
metric_list: [{metric: acc}]
"""
GENERATE = """
task: tiny_generate
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{options[right]}}"
generation_kwargs: {until: ["."], max_gen_toks: 16, do_sample: false, temperature: 0.0}
metric_list: [{metric: exact_match}]
"""


def _evaluate(server: Any, model: str, path: str, task: str, *more: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "documents.jsonl"
        data.write_text("".join(json.dumps(each) + "\n" for each in DOCUMENTS))
        for number, text in enumerate((CHOICE, GENERATE)):
            (folder / f"task{number}.yaml").write_text(text.replace("DATA", str(data)))
        options = {
            "model": server.model,
            "base_url": server.base_url + path,
            "num_concurrent": 2,
            "max_retries": 1,
            "tokenizer": server.tokenizer,
        }
        out = folder / "out"
        command = [
            *(sys.executable, "-m", "lm_eval", "--model", model, "--tasks", task),
            *("--include_path", str(folder), "--output_path", str(out), "--log_samples"),
            *("--model_args", ",".join(f"{key}={value}" for key, value in options.items())),
            *more,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        print(done.stdout, done.stderr, sep="\n")
        lines = done.stderr.strip().splitlines() or ["no output"]
        assert done.returncode == 0, lines[-1]
        [found] = out.rglob("results_*.json")
        result: dict[str, Any] = json.loads(found.read_text())["results"][task]
        return result


def likelihoods(server: Any) -> None:
    """local-completions, multiple_choice"""
    found = _evaluate(server, "local-completions", "/completions", "tiny_choice")
    assert found["acc,none"] == 1.0, found


def generated(server: Any) -> None:
    """local-completions, generate_until"""
    _evaluate(server, "local-completions", "/completions", "tiny_generate")


def chats(server: Any) -> None:
    """local-chat-completions, generate_until"""
    more = "--apply_chat_template"
    _evaluate(server, "local-chat-completions", "/chat/completions", "tiny_generate", more)
