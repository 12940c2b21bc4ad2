"""The exception tree.

PageStreamError
├── SettingsError       a setting is unknown, or its value is not valid
├── DecodeError         bytes are not a valid message
├── BusError
│   ├── BusUnavailable  Redis cannot be reached, or is too old
│   │   └── LoginRefused    Redis rejects the user or password
│   └── StaleWriter     an append was refused: another writer has taken over the log
└── ModelUnsupported    a model cannot be served, with the reason
"""


class PageStreamError(Exception):
    """Base of every error that PageStream raises on purpose."""


class SettingsError(PageStreamError):
    """A setting that is not valid.

    Args:
        key: the environment variable or the flag, as the user wrote it.
        value: as given.
        reason: what is expected.
    """

    def __init__(self, key: str, value: object, reason: str) -> None:
        super().__init__(f"{key}={value!r}: {reason}")
        self.key = key
        self.value = value
        self.reason = reason


class DecodeError(PageStreamError):
    """Bytes that are not a valid message.

    Attributes:
        request_id: of the message, if it can be read; the sender of the request gets an error then.
    """

    def __init__(self, reason: str, request_id: str | None = None) -> None:
        super().__init__(reason)
        self.request_id = request_id


class BusError(PageStreamError):
    """Base of errors between this process and the logs."""


class BusUnavailable(BusError):
    """Redis did not answer; the last append may or may not have been executed."""


class LoginRefused(BusUnavailable):
    """Redis rejects the user or password of its URL."""


class StaleWriter(BusError):
    """Redis refused an append: the id of the log's last entry is not below that of the new one."""


class ModelUnsupported(PageStreamError):
    """The model cannot be served correctly; the message has the reason."""
