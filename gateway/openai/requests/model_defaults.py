"""The model's own sampling defaults, from its ``generation_config.json``."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from gateway.openai.requests.sampling_fields import sampling_field
from shared.errors import SettingsError
from shared.sampling import PARAMETERS

_FILE = "generation_config.json"
# Of transformers' parameters, those that have the same meaning here.
_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_model_defaults(model: str) -> Mapping[str, Any]:
    """Values of sampling parameters for requests that give none, by name.

    Args:
        model: a folder, or a hub id.

    Raises:
        SettingsError: the file is no JSON object, or a value is not allowed.
    """
    path = _path(model)
    if path is None:
        return {}
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(_FILE, str(path), f"JSON is expected ({error})") from None
    if not isinstance(config, dict):
        raise SettingsError(_FILE, str(path), "a JSON object is expected")
    found = {}
    for name in _NAMES:
        given = config.get(name)
        if given is not None:
            found[name] = _checked(path, name, given)
    if config.get("do_sample") is False:
        found["temperature"] = 0.0  # as transformers does
    return found


def _checked(path: Path, name: str, given: Any) -> Any:
    kind, _ = sampling_field(PARAMETERS[name])
    try:
        return PARAMETERS[name].value(TypeAdapter(kind).validate_python(given))
    except ValidationError as error:
        reason = f"{error.errors()[0]['msg']}; --generation-config none ignores this file"
        value = given[:80] if isinstance(given, str | list) else given
        raise SettingsError(f"{path}: {name}", value, reason) from None


def _path(model: str) -> Path | None:
    """The file of a model; None: it has none."""
    from transformers.utils.hub import cached_file

    try:
        found = cached_file(
            model,
            _FILE,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except (OSError, ValueError):
        found = None
    return None if found is None else Path(found)
