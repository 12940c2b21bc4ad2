"""Structured logs: one line per event with ``key=value`` fields."""

import json
import logging
import os
import sys
import time
from typing import Any, TextIO

LOG_FILE = "SERVICE_LOG_FILE"  # names the file to which the launcher has opened standard error
_STDOUT, _STDERR = 1, 2


class _Formatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = getattr(record, "fields", {})
        parts = [
            f"{stamp}.{int(record.msecs):03d}Z {record.levelname:<7} {self._service}",
            record.getMessage(),
            *(f"{key}={_value(value)}" for key, value in fields.items()),
        ]
        line = " ".join(parts)
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _value(value: Any) -> str:
    text = str(value)
    plain = text.isprintable() and not any(c in text for c in ' "=')
    return text if text and plain else json.dumps(text)


class _Output(logging.StreamHandler[TextIO]):
    """Writes to standard error; if that is a log file, reopens it when it has been replaced.

    Args:
        path: of the log file, which may be renamed and replaced at any time; "": there is none.
    """

    def __init__(self, path: str) -> None:
        super().__init__(sys.stderr)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        if self._path:
            self._reopen_if_replaced()
        super().emit(record)

    def _reopen_if_replaced(self) -> None:
        try:
            if os.path.samestat(os.stat(self._path), os.fstat(_STDERR)):
                return
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        except OSError:  # it is being replaced
            return
        for descriptor in (_STDOUT, _STDERR):
            os.dup2(file, descriptor)
        os.close(file)


def setup_logging(service: str, level: str) -> None:
    """Send this process's logs to standard error.

    Args:
        service: name in every line.
        level: a level of ``logging`` by name.
    """
    handler = _Output(os.environ.get(LOG_FILE, ""))
    handler.setFormatter(_Formatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class EventLog:
    """A logger whose keyword arguments become fields: ``log.info("ready", epoch=3)``."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, **fields: Any) -> None:
        self._logger.debug(event, extra={"fields": fields})

    def info(self, event: str, **fields: Any) -> None:
        self._logger.info(event, extra={"fields": fields})

    def warning(self, event: str, **fields: Any) -> None:
        self._logger.warning(event, extra={"fields": fields})

    def error(self, event: str, **fields: Any) -> None:
        self._logger.error(event, extra={"fields": fields})

    def exception(self, event: str, **fields: Any) -> None:
        self._logger.exception(event, extra={"fields": fields})
