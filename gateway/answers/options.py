"""How an answer is parsed: stored with its request, for a gateway that takes it over."""

from collections.abc import Mapping, Set
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolShape:
    """What a parser needs of a tool."""

    name: str
    strings: tuple[str, ...]  # its parameters of type string


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How an answer is parsed.

    Attributes:
        calls: name of the format of calls, "" if they are not looked for.
        reasoning: name of the format of reasoning, "" if it is not looked for.
        tools: of the request, where the format of calls is parsed by them.
        parallel: an answer may have several calls; otherwise it ends with the first one.
    """

    calls: str
    reasoning: str
    tools: tuple[ToolShape, ...] = ()
    parallel: bool = True

    @property
    def strings(self) -> Mapping[str, Set[str]]:
        """By tool, its parameters of type string."""
        return {tool.name: frozenset(tool.strings) for tool in self.tools}
