"""The clients: their names, environments and programs, and which failures are faults of theirs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
ENVIRONMENTS = HERE / "environments"

# Calls with a name that begins so need this path; they are skipped where a server lacks it.
NEEDS = {
    "responses.": "/v1/responses",
    "messages.": "/v1/messages",
    "batches.": "/v1/batches",
}


@dataclass(frozen=True, slots=True)
class Client:
    """Another project's client.

    Attributes:
        name: the stem of its requirements file, or its folder with a ``package.json``.
        package: the one whose version is shown.
        program: file with the calls.
        known: calls that fail by the client's own fault, each with the reason.
    """

    name: str
    package: str
    program: str
    known: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_node(self) -> bool:
        """Whether it runs in Node.js, not in Python."""
        return self.program.endswith(".mjs")

    @property
    def requirements(self) -> Path:
        """The file that pins its packages."""
        if self.is_node:
            return ENVIRONMENTS / self.name / "package.json"
        return ENVIRONMENTS / f"{self.name}.txt"


CLIENTS = {
    client.name: client
    for client in (
        Client("openai-python", "openai", "openai_python.py"),
        Client("openai-node", "openai", "openai_node.mjs"),
        Client("anthropic-python", "anthropic", "anthropic_python.py"),
        Client("anthropic-node", "@anthropic-ai/sdk", "anthropic_node.mjs"),
        Client("langchain", "langchain-openai", "langchain_chat.py"),
        Client("litellm", "litellm", "litellm_proxy.py"),
        Client("instructor", "instructor", "instructor_models.py"),
        Client("pydantic-ai", "pydantic-ai-slim", "pydantic_agents.py"),
        Client("openai-agents", "openai-agents", "openai_agents.py"),
        Client("llama-index", "llama-index-llms-openai-like", "llama_index.py"),
        Client("vercel-ai", "ai", "vercel_ai.mjs"),
        Client("lm-eval", "lm_eval", "evaluation.py"),
        Client("guidellm", "guidellm", "load.py"),
    )
}
