"""Recognizes chat templates that write control tokens only as a whole, from their source."""

from collections.abc import Collection, Sequence
from itertools import pairwise

from jinja2 import Environment, TemplateError
from jinja2.lexer import Token

OPENING = "<"  # nothing that is allowed below makes this character from other text
_GIVEN = "messages"
_TAGS = frozenset({"if", "elif", "else", "endif", "for", "endfor", "set", "macro", "endmacro"})
_FILTERS = frozenset({"default", "length", "lower", "string", "tojson", "trim", "upper"})
_METHODS = frozenset({"endswith", "get", "items", "keys", "startswith", "strip"})
_FUNCTIONS = frozenset({"namespace", "raise_exception", "range", "strftime_now"})
_WORDS = frozenset({"and", "or", "not", "in", "if", "elif", "else"})
# Filters and functions that may have arguments.
_CALLED = (_METHODS | _FUNCTIONS | _WORDS | {"default", "tojson"}) - {"strip"}
_VALUES = frozenset({"rparen", "rbracket", "rbrace", "string"})
_BEHIND_NAMES = frozenset({"add", "tilde", "variable_end"})


def writes_names_whole(source: str, names: Collection[str]) -> bool:
    """Whether all control tokens in a prompt are the template's own if no message contains ``<``.

    That holds if every name begins with ``<``, and the source contains it only to write a whole
    name straight into the prompt. All else in the source must be among a few constructs that
    neither write ``<`` nor cut text. False if this is not certain.
    """
    if any(not name.startswith(OPENING) or name[-1].isspace() for name in names):
        return False
    if any(longer.startswith(name) for name in names for longer in names if longer != name):
        return False
    try:
        tokens = list(Environment().lexer.tokenize(source))
    except TemplateError:
        return False
    texts = [str(token.value) for token in tokens if token.type in ("data", "string")]
    blocks = _blocks(tokens)
    macros = {str(block[1].value) for block in blocks if block[0].value == "macro"}
    return all(_has_whole_names(text, names) for text in texts) and all(
        _is_common(block) and _cuts_nothing(block, macros) and _writes_out(block, macros)
        for block in blocks
    )


def _blocks(tokens: Sequence[Token]) -> list[list[Token]]:
    """The tokens inside each pair of braces, and its end."""
    blocks: list[list[Token]] = []
    for token in tokens:
        if token.type in ("block_begin", "variable_begin"):
            blocks.append([])
        elif token.type != "data":
            blocks[-1].append(token)
    return blocks


def _has_whole_names(text: str, names: Collection[str]) -> bool:
    pieces = text.split(OPENING)[1:]
    return all(any((OPENING + piece).startswith(name) for name in names) for piece in pieces)


def _is_output(block: Sequence[Token]) -> bool:
    return block[-1].type == "variable_end"


def _is_common(block: Sequence[Token]) -> bool:
    """Whether a block is output or an allowed tag that does not redefine ``messages``."""
    if _is_output(block):
        return True
    types, values = [token.type for token in block], [str(token.value) for token in block]
    match values[0]:
        case "macro":
            return _GIVEN not in values
        case "for":
            at = values.index("in") if "in" in values else len(values)
            return _GIVEN not in values[:at] and "lparen" not in types[at:]
        case "set":  # without "=" it captures the output up to its end
            is_made_here = "lparen" in types and "namespace" not in values
            return values[1] != _GIVEN and "assign" in types and not is_made_here
    return values[0] in _TAGS


def _cuts_nothing(block: Sequence[Token], macros: Collection[str]) -> bool:
    """Whether a block calls only what is allowed, and cuts no text."""
    for index, (token, behind) in enumerate(pairwise(block)):
        before = block[index - 1] if index else token
        after = [found.type for found in block[index + 1 : index + 3]]
        match token.type:
            case "mod":
                return False
            case "pipe" if behind.value not in _FILTERS:
                return False
            case "dot" if behind.type != "name" or before.type in _VALUES - {"rbracket"}:
                return False
            case "lbracket" if before.value != _GIVEN and after != ["string", "rbracket"]:
                return False
            case "lparen" if before.type in _VALUES:
                return False
            case "name" if behind.type == "lparen" and token.value not in macros:
                is_bare = token.value == "strip" and after[1:] == ["rparen"]
                if token.value not in _CALLED and not is_bare:
                    return False
    return True


def _writes_out(block: Sequence[Token], macros: Collection[str]) -> bool:
    """Whether names of control tokens, and output of macros, go straight into the prompt."""
    depth = 0
    for index, token in enumerate(block):
        depth += (token.type == "lparen") - (token.type == "rparen")
        text, behind = str(token.value), block[min(index + 1, len(block) - 1)]
        is_straight = _is_output(block) and not depth
        if token.type == "name" and text in macros and block[0].value != "macro":
            if not is_straight:
                return False
        elif (token.type == "string" and OPENING in text) or (
            token.type == "name" and "token" in text  # variables such as bos_token hold names
        ):
            is_whole = behind.type in _BEHIND_NAMES or behind.value in ("if", "else")
            if not (is_straight and is_whole):
                return False
    return True
