"""How families of models write reasoning and calls of tools, as data."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from gateway.answers.tag_calls import Tags


class Body(Enum):
    """What stands between the markers of calls."""

    JSON = auto()  # {"name": ..., "arguments": {...}}, one or several
    NAMED = auto()  # the same, or name[ARGS]{...}
    TAGS = auto()


@dataclass(frozen=True, slots=True)
class CallWrapper:
    """How calls are written where an answer must have some.

    Attributes:
        before, after: text around the calls, or around each.
        between: text between calls; "": there is only one.
        each: every call has the text around it.
        arguments: the key of the arguments, where they are JSON.
    """

    before: str
    after: str
    between: str = ", "
    each: bool = False
    arguments: str = "arguments"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family of models writes calls.

    Attributes:
        opens: markers before calls.
        closes: markers behind calls; () if calls end with themselves.
        in_template: one of these in the chat template shows that the model writes so.
        wrapper: how calls are written where an answer must have some.
        bare: an answer that begins with ``{`` is a call if it names a tool of the request.
        tags: of ``Body.TAGS``.
        id_chars: characters of a call's id, where the chat template takes no others; 0: any.
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    in_template: tuple[str, ...]
    wrapper: CallWrapper
    body: Body = Body.JSON
    bare: bool = False
    tags: Tags | None = None
    id_chars: int = 0

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers, which may be special tokens."""
        inner = self.tags.name + self.tags.key + self.tags.value if self.tags else ()
        named = ("[ARGS]", "[CALL_ID]") if self.body is Body.NAMED else ()
        return (*self.opens, *self.closes, *filter(None, inner), *named)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers around reasoning."""

    open: str
    close: str


# In the order in which they are tried: the first whose sign is in the chat template is taken.
CALL_FORMATS = {
    "mistral": CallFormat(
        ("[TOOL_CALLS]",),
        (),
        ("[TOOL_CALLS]",),
        body=Body.NAMED,
        wrapper=CallWrapper("[TOOL_CALLS][", "]"),
        id_chars=9,
    ),
    "glm": CallFormat(
        ("<tool_call>",),
        ("</tool_call>",),
        ("<arg_key>",),
        body=Body.TAGS,
        tags=Tags(("", ""), ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>")),
        wrapper=CallWrapper("<tool_call>", "</tool_call>", between="\n", each=True),
    ),
    "qwen3_coder": CallFormat(
        ("<tool_call>",),
        ("</tool_call>",),
        ("<parameter=",),
        body=Body.TAGS,
        tags=Tags(("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>"), True),
        wrapper=CallWrapper("<tool_call>\n", "</function>\n</tool_call>", between="\n", each=True),
    ),
    "phi4": CallFormat(
        ("<|tool_call|>",),
        ("<|/tool_call|>",),
        ("<|/tool_call|>",),
        wrapper=CallWrapper("<|tool_call|>[", "]<|/tool_call|>"),
    ),
    "granite": CallFormat(
        ("<|tool_call|>", "<tool_call>"),
        ("</tool_call>",),
        ("<|tool_call|>",),
        wrapper=CallWrapper("<|tool_call|>[", "]"),
    ),
    "hermes": CallFormat(
        ("<tool_call>",),
        ("</tool_call>",),
        ("<tool_call>",),
        wrapper=CallWrapper("<tool_call>\n", "\n</tool_call>", between="\n", each=True),
    ),
    "llama3": CallFormat(
        ("<|python_tag|>",),
        (),
        ("<|python_tag|>", '"parameters": dictionary'),
        bare=True,
        wrapper=CallWrapper("", "", between="; ", arguments="parameters"),
    ),
}

REASONING_FORMATS = {
    "think": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
}


def call_format_of(templates: Iterable[str]) -> str | None:
    """The name of the format that a model's chat templates use, None if none is recognized."""
    text = "\n".join(templates)
    for name, each in CALL_FORMATS.items():
        if any(sign in text for sign in each.in_template):
            return name
    return None


def reasoning_format_of(templates: Iterable[str], tokens: Iterable[str]) -> str | None:
    """The name of the format of a model's reasoning.

    Args:
        templates: its chat templates.
        tokens: names of its added tokens.
    """
    text, names = "\n".join(templates), set(tokens)
    for name, each in REASONING_FORMATS.items():
        if each.close in text or each.close in names:
            return name
    return None
