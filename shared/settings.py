"""Settings: one frozen dataclass per service, parsed once at start.

Every setting is a flag (``--block-size``) and an environment variable (``PAGESTREAM_BLOCK_SIZE``,
unless it names its own); the flag wins. The launcher, which has the settings of all services,
refuses unknown ``PAGESTREAM_`` variables.
"""

import argparse
import dataclasses
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, cast

from shared.errors import SettingsError
from shared.suggestions import did_you_mean
from shared.version import version

PREFIX = "PAGESTREAM_"

_S = TypeVar("_S")


@dataclass(frozen=True, slots=True)
class _Meta:
    help: str
    parse: Callable[[str], Any] | None
    minimum: float | None
    maximum: float | None
    choices: tuple[str, ...] | None
    env: str | None
    secret: bool


def setting(
    default: Any,
    help_text: str,
    *,
    parse: Callable[[str], Any] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] | None = None,
    env: str | None = None,
    secret: bool = False,
) -> Any:
    """A field of a settings dataclass.

    Args:
        parse: converts the text; raises ValueError with what is expected. By default the field's
            type decides, and ``auto`` is None if the type allows None.
        minimum, maximum: inclusive bounds of numbers.
        env: name of the environment variable if it is not ``PAGESTREAM_<NAME>``.
        secret: there is no flag, because all users of a machine can read command lines.
    """
    meta = _Meta(help_text, parse, minimum, maximum, choices, env, secret)
    return dataclasses.field(default=default, metadata={"setting": meta})


def byte_size(text: str) -> int:
    """``1073741824``, ``1GiB``, ``512M``: a number of bytes.

    Raises:
        ValueError: anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError("expected a number of bytes such as 1073741824, 512MiB or 2GiB")
    power = " KMGT".index(match[2].upper() or " ")
    return int(float(match[1]) * (1024**power))


def power_of_two(text: str) -> int:
    """``16``: a power of two.

    Raises:
        ValueError: anything else.
    """
    value = _parse_int(text)
    if value < 1 or value & (value - 1):
        raise ValueError("must be a power of two")
    return value


def env_name(field: "dataclasses.Field[Any]") -> str:
    """Environment variable of a setting."""
    meta: _Meta = field.metadata["setting"]
    return meta.env or PREFIX + field.name.upper()


def flag_name(field: "dataclasses.Field[Any]") -> str:
    """Command-line flag of a setting."""
    return "--" + field.name.replace("_", "-")


class SettingsParser(argparse.ArgumentParser):
    """A command line of settings; an error is one line, without the list of all flags.

    Args:
        prog: the command that the user types; None: as Python was called.
    """

    def __init__(self, description: str, prog: str | None = None) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)
        self.add_argument("--version", action="version", version=f"PageStream {version()}")

    def read(self, argv: Sequence[str] | None = None) -> Mapping[str, str]:
        """Values of the flags by field name; exits with 2 if a flag is not valid."""
        flags, unknown = self.parse_known_args(argv)
        if unknown:
            flag = next((word for word in unknown if word.startswith("-")), unknown[0])
            name = flag.partition("=")[0]
            known = [option for action in self._actions for option in action.option_strings]
            self.error(f"{name}: there is no such flag{did_you_mean(name, known)}")
        return vars(flags)

    def error(self, message: str) -> NoReturn:
        """Exit with 2."""
        self.exit(2, f"error: {message} (--help lists all flags)\n")


def add_flags(parser: argparse.ArgumentParser, cls: type, seen: set[str] | None = None) -> None:
    """Declare a flag for each setting of ``cls`` that is not in ``seen``, and add it there."""
    group = parser.add_argument_group(cls.__name__.removesuffix("Settings").lower() + " settings")
    for field in dataclasses.fields(cls):
        if seen is not None:
            if field.name in seen:
                continue
            seen.add(field.name)
        meta: _Meta = field.metadata["setting"]
        if meta.secret:
            known = f"{group.description} " if group.description else ""
            text = f"{env_name(field)} (a variable only): {meta.help}"
            group.description = known + text
            continue
        default = "auto" if field.default is None else field.default
        extra = f" One of {', '.join(meta.choices)}." if meta.choices else ""
        is_switch = isinstance(field.default, bool)  # the flag without a value means true
        group.add_argument(
            flag_name(field),
            nargs="?" if is_switch else None,
            const="true" if is_switch else None,
            dest=field.name,
            metavar="BOOL" if is_switch else field.name.rpartition("_")[2].upper(),
            default=argparse.SUPPRESS,
            help=f"{meta.help}{extra} [{env_name(field)}, default {default}]".replace("%", "%%"),
        )


def load(cls: type[_S], flags: Mapping[str, str], environ: Mapping[str, str]) -> _S:
    """Settings of one service from flags (by field name) and environment.

    Raises:
        SettingsError: names the flag or variable and the value.
    """
    hints = typing.get_type_hints(cls)
    values = {}
    for field in dataclasses.fields(cast(Any, cls)):
        if field.name in flags and not field.metadata["setting"].secret:
            key, text = flag_name(field), flags[field.name]
        elif environ.get(env_name(field), "") != "":
            key, text = env_name(field), environ[env_name(field)]
        else:
            continue
        values[field.name] = _parse(key, text, hints[field.name], field.metadata["setting"])
    return cls(**values)


def load_or_exit(cls: type[_S], description: str) -> _S:
    """Settings from the command line and the environment; exits with 2 if one is not valid."""
    import os

    parser = SettingsParser(description)
    add_flags(parser, cls)
    try:
        return load(cls, parser.read(), os.environ)
    except SettingsError as error:
        exit_with(error)


def exit_with(error: SettingsError) -> NoReturn:
    """Print the error and exit with status 2."""
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)


def check_environment(classes: Sequence[type], environ: Mapping[str, str]) -> None:
    """Refuse misspelled variables.

    Raises:
        SettingsError: a ``PAGESTREAM_`` variable that no setting of ``classes`` reads.
    """
    known = {env_name(field) for cls in classes for field in dataclasses.fields(cls)}
    for key in sorted(environ):
        if key.startswith(PREFIX) and key not in known:
            reason = f"there is no such setting{did_you_mean(key, known)}"
            raise SettingsError(key, environ[key], reason)


def _parse(key: str, text: str, hint: Any, meta: _Meta) -> Any:
    kinds = typing.get_args(hint) if typing.get_origin(hint) in _UNIONS else (hint,)
    if text == "auto" and types.NoneType in kinds:
        return None
    kind = next(kind for kind in kinds if kind is not types.NoneType)
    try:
        value = (meta.parse or _PARSERS[kind])(text)
    except ValueError as error:
        raise SettingsError(key, text, str(error)) from None
    if meta.choices is not None and value not in meta.choices:
        meant = did_you_mean(text, meta.choices)
        raise SettingsError(key, text, f"expected one of {', '.join(meta.choices)}{meant}")
    if meta.minimum is not None and not value >= meta.minimum:
        raise SettingsError(key, text, f"must be at least {meta.minimum}")
    if meta.maximum is not None and not value <= meta.maximum:
        raise SettingsError(key, text, f"must be at most {meta.maximum}")
    return value


def _parse_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("expected a whole number") from None


def _parse_float(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise ValueError("expected a number") from None
    if not math.isfinite(number):
        raise ValueError("expected a finite number")
    return number


def _parse_bool(text: str) -> bool:
    lowered = text.lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ValueError("expected true or false")


_UNIONS = (typing.Union, types.UnionType)
_PARSERS: dict[Any, Callable[[str], Any]] = {
    int: _parse_int,
    float: _parse_float,
    bool: _parse_bool,
    str: str,
}
