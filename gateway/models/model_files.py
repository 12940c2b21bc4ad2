"""What a gateway reads of a model's files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from gateway.answers.answer_formats import AnswerFormats
from gateway.openai.requests.model_defaults import read_model_defaults
from gateway.pins.pin_requests import Prefix
from gateway.pins.prefix_file import read_prefixes
from gateway.settings import GatewaySettings
from gateway.text.tokenizer import Tokenizer
from shared.logs import EventLog

_log = EventLog("gateway.models.model_files")
_NO_DEFAULTS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's tokenizer, and what follows from it and the settings.

    Attributes:
        name: of the model, as clients give it.
        root: the folder, file or hub id that they were read from.
        answers: the formats in which the model answers.
        defaults: of sampling parameters, where the model's differ from the API's.
        prefixes: those that engines are to keep in their pools.
    """

    name: str
    root: str
    tokenizer: Tokenizer
    answers: AnswerFormats
    defaults: Mapping[str, Any]
    prefixes: Sequence[Prefix]

    @staticmethod
    def read(name: str, root: str, settings: GatewaySettings) -> "ModelFiles":
        """Read them; takes seconds.

        Raises:
            ModelUnsupported: the tokenizer cannot be read.
            SettingsError: the sampling defaults or the pinned prefixes cannot be used.
        """
        trusted, special = settings.trust_remote_code, settings.special_tokens_in_messages
        tokenizer = Tokenizer.load(root, trusted, special)
        defaults = _NO_DEFAULTS
        if settings.generation_config != "none":
            defaults = read_model_defaults(root)
            _log.info("sampling defaults of the model", model=name, **defaults)
        return ModelFiles.of(name, root, tokenizer, settings, defaults)

    @staticmethod
    def of(
        name: str,
        root: str,
        tokenizer: Tokenizer,
        settings: GatewaySettings,
        defaults: Mapping[str, Any] = _NO_DEFAULTS,
    ) -> "ModelFiles":
        """With a tokenizer that was read already.

        Raises:
            SettingsError: the pinned prefixes cannot be used.
        """
        answers = tokenizer.answer_formats(settings.tool_call_parser, settings.reasoning_parser)
        calls = (answers.calls if answers.describes_tools else None) or "none"
        reasoning = answers.reasoning or "none"
        _log.info("formats of answers chosen", model=name, calls=calls, reasoning=reasoning)
        prefixes = read_prefixes(settings.pinned_prefixes, tokenizer, name)
        return ModelFiles(name, root, tokenizer, answers, defaults, prefixes)
