"""The one exception tree.

PageStreamError
├── SettingsError       a setting is unknown or its value cannot be used
├── DecodeError         an entry of a log is not the message it claims to be
├── BusError
│   ├── BusUnavailable  Redis cannot be reached, or is too old
│   │   └── LoginRefused    it does not know the user or password
│   └── StaleWriter     an append was refused: another writer has taken the log over
└── ModelUnsupported    a model cannot be served, with the reason
"""


class PageStreamError(Exception):
    """Base of every error that PageStream raises on purpose."""


class SettingsError(PageStreamError):
    """A setting that cannot be used.

    Args:
        key: name as the user wrote it: an environment variable or a flag.
        value: what was given.
        reason: what would have been right.
    """

    def __init__(self, key: str, value: object, reason: str) -> None:
        super().__init__(f"{key}={value!r}: {reason}")
        self.key = key
        self.value = value
        self.reason = reason


class DecodeError(PageStreamError):
    """Bytes that are no valid message.

    ``request_id`` is set where it could still be read, so that the sender can be answered.
    """

    def __init__(self, reason: str, request_id: str | None = None) -> None:
        super().__init__(reason)
        self.request_id = request_id


class BusError(PageStreamError):
    """Something is wrong between this process and the logs."""


class BusUnavailable(BusError):
    """Redis did not answer; whether the last append was carried out is unknown."""


class LoginRefused(BusUnavailable):
    """Redis asks for a user and password that it knows; those in its URL are not."""


class StaleWriter(BusError):
    """Redis refused an append because the log's top entry is not below the entry's id."""


class ModelUnsupported(PageStreamError):
    """The model cannot be served correctly; the text says why."""
