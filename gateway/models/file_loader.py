"""Reads the files of models beside the event loop, one model after the other."""

import asyncio
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from gateway.models.model_files import ModelFiles
from gateway.settings import GatewaySettings
from shared.errors import ModelUnsupported, SettingsError
from shared.logs import EventLog
from shared.model_name import model_name
from shared.service_settings import DEMO_MODEL
from shared.tasks import cancel_until_done

_log = EventLog("gateway.models.file_loader")
_AGAIN_S = 30.0

ReadFiles = Callable[[str, str], ModelFiles]
"""Reads the files of a model by its name, from a folder, a file or a hub id."""


@dataclass(frozen=True, slots=True)
class _Failure:
    reason: str
    again_s: float


class FileLoader:
    """Reads the files of models whose engines have joined.

    Args:
        read: raises ModelUnsupported or SettingsError.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        read: ReadFiles,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._read = read
        self._clock_s = clock_s
        self._one_at_a_time = asyncio.Lock()
        self._tasks: dict[str, asyncio.Task[ModelFiles]] = {}
        self._failures: dict[str, _Failure] = {}

    @property
    def names(self) -> set[str]:
        """Models whose files are being read."""
        return set(self._tasks)

    def take(self, name: str, roots: Sequence[str]) -> ModelFiles | None:
        """The files of a model as soon as they were read; each call may begin to read.

        Args:
            roots: where its engines have them.
        """
        task = self._tasks.get(name)
        if task is None:
            failure = self._failures.get(name)
            if failure is None or failure.again_s <= self._clock_s():
                work = self._load(name, _places(name, roots, self._settings))
                self._tasks[name] = asyncio.create_task(work, name=f"files of {name}")
            return None
        if not task.done():
            return None
        del self._tasks[name]
        try:
            files = task.result()
        except ModelUnsupported as error:
            known = self._failures.get(name)
            self._failures[name] = _Failure(str(error), self._clock_s() + _AGAIN_S)
            if known is None or known.reason != str(error):
                _log.error("model not served", model=name, error=error, retry_s=_AGAIN_S)
            return None
        self._failures.pop(name, None)
        return files

    def forget_others(self, names: Container[str]) -> None:
        """Forget failures of models that have no engine any more, and files that were read."""
        self._failures = {one: why for one, why in self._failures.items() if one in names}
        for name in [name for name, task in self._tasks.items() if task.done()]:
            if name not in names:
                self._tasks.pop(name).exception()

    def why_not(self, name: str) -> str | None:
        """Why a model is not served yet; None: its files are not asked for."""
        failure = self._failures.get(name)
        if failure is not None:
            return f"this gateway cannot serve the model {name!r}: {failure.reason}"
        if name in self._tasks:
            return f"the files of the model {name!r} are being read"
        return None

    def why_any(self) -> str | None:
        """The same for any model."""
        return next((self.why_not(name) for name in (*self._tasks, *self._failures)), None)

    async def close(self) -> None:
        """Wait for files that are being read, and drop them."""
        await cancel_until_done(*self._tasks.values())

    async def _load(self, name: str, places: Sequence[str]) -> ModelFiles:
        reasons = []
        async with self._one_at_a_time:
            for root in places:
                began_s = self._clock_s()
                _log.info("began to read a model's files", model=name, root=root)
                try:
                    files = await asyncio.to_thread(self._read, name, root)
                except (ModelUnsupported, SettingsError) as error:
                    reasons.append(str(error))
                except Exception as error:  # whatever is in these files, other models are served
                    reasons.append(f"{root}: {type(error).__name__}: {error}")
                else:
                    seconds = round(self._clock_s() - began_s, 2)
                    _log.info("read a model's files", model=name, root=root, seconds=seconds)
                    return files
        why = "its engines do not name its files, and --model is another one"
        raise ModelUnsupported("; ".join(reasons) or why)


def _places(name: str, roots: Sequence[str], settings: GatewaySettings) -> list[str]:
    """Where to look for a model's files: where this gateway has its own, if they are of this model.

    Its default model is not one that it was given, and comes last.
    """
    announced = [root for root in roots if root]
    is_own = model_name(settings.model, settings.served_model_name) == name
    own = [settings.model] if is_own else []
    is_given = settings.model != DEMO_MODEL
    return list(dict.fromkeys([*own, *announced] if is_given else [*announced, *own]))
