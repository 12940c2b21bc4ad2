"""The models of one gateway by name, and the table of a gateway that serves one engine."""

import asyncio
from abc import ABC, abstractmethod

from gateway.engine.client import EngineClient
from gateway.http.errors import ApiError, invalid, unavailable, unknown_model
from gateway.models.served_model import ServedModel
from shared.bus.api import Bus


class ModelTable(ABC):
    """All models that calls can name.

    Attributes:
        why_empty: why there is no model.
    """

    def __init__(self) -> None:
        self.why_empty = "no model is served"
        self._served: dict[str, ServedModel] = {}

    # ----------------------------------------------------------------- models

    @property
    def served(self) -> list[ServedModel]:
        """The models whose files were read, by name."""
        return [self._served[name] for name in sorted(self._served)]

    def find(self, name: str) -> ServedModel | None:
        """A model by its name; None: it is not here, or its files were not read yet."""
        return self._served.get(name)

    def may_serve(self, name: str) -> bool:
        """Whether a model by this name is served here, now or soon."""
        return name in self._served or self.why_away(name) is not None

    def named(self, name: str | None) -> ServedModel:
        """The model that a call names; the only one, if it names none.

        Raises:
            ApiError: 404, there is none by this name; 503, its files were not read yet; 400, there
                are several and the call names none.
        """
        if name is None:
            return self._unnamed()
        found = self._served.get(name)
        if found is not None:
            return found
        reason = self.why_away(name)
        raise unknown_model(name, sorted(self._served)) if reason is None else unavailable(reason)

    def _unnamed(self) -> ServedModel:
        if len(self._served) == 1:
            return next(iter(self._served.values()))
        if not self._served:
            raise self._none_ready()
        names = ", ".join(sorted(self._served))
        raise invalid("model", f"model: needed, as several are served here: {names}")

    @abstractmethod
    def why_away(self, name: str) -> str | None:
        """Why a model by this name may be served later; None: it is not known."""

    @abstractmethod
    def kept(self, name: str) -> ServedModel:
        """The model of something that was kept before this gateway started.

        Raises:
            ApiError: 503, it is not served now.
        """

    @abstractmethod
    async def owner(self, request_id: str) -> ServedModel | None:
        """The model of a request by its id; None: the request is not remembered.

        Raises:
            ApiError: 503, it cannot be found out now.
        """

    @abstractmethod
    async def is_of_other(self, request_id: str, model: ServedModel) -> bool:
        """Whether another model has a request by this id."""

    # ------------------------------------------------------------------ state

    @property
    @abstractmethod
    def memory_share(self) -> float:
        """Share in use of the memory limit of the Redis that keeps files and responses."""

    @property
    def logs(self) -> dict[str, Bus]:
        """Where the logs of each engine are."""
        return {
            name: bus for model in self._served.values() for name, bus in model.engine.logs.items()
        }

    @property
    def is_full(self) -> bool:
        """Every engine of every model would refuse a new request."""
        return bool(self._served) and all(m.engine.is_full for m in self._served.values())

    @property
    def num_open(self) -> int:
        """The number of requests that calls wait for."""
        return sum(model.engine.num_open for model in self._served.values())

    def why_none_ready(self) -> ApiError | None:
        """The error for any new request; None if one model can take some."""
        if any(model.ready is not None for model in self._served.values()):
            return None
        return self._none_ready()

    def _none_ready(self) -> ApiError:
        reasons = (model.why_not_ready() for model in self.served)
        found = next((reason for reason in reasons if reason is not None), None)
        return found or unavailable(self.why_empty)

    # -------------------------------------------------------------------- run

    @abstractmethod
    async def run(self) -> None:
        """Read the logs of engines until cancelled."""

    def leave(self) -> None:
        """Tell every call that this process stops."""
        for model in self._served.values():
            model.engine.leave()

    async def all_closed(self) -> None:
        """Return when no request is open."""
        await asyncio.gather(*(model.engine.all_closed() for model in self._served.values()))

    async def flushed(self) -> None:
        """Return when all that was sent has been appended."""
        await asyncio.gather(*(model.engine.flushed() for model in self._served.values()))

    def close(self) -> None:
        """Stop the threads and processes of all models."""
        for model in self._served.values():
            model.close()


class OneModel(ModelTable):
    """The model of one engine.

    Args:
        client: of the engine.
    """

    def __init__(self, model: ServedModel, client: EngineClient) -> None:
        super().__init__()
        self._served[model.name] = model
        self._model = model
        self._client = client

    def why_away(self, name: str) -> str | None:  # noqa: ARG002
        """None: there is one model."""
        return None

    def kept(self, name: str) -> ServedModel:  # noqa: ARG002
        """The model, whatever it was called then."""
        return self._model

    async def owner(self, request_id: str) -> ServedModel | None:  # noqa: ARG002
        """The model."""
        return self._model

    async def is_of_other(self, request_id: str, model: ServedModel) -> bool:  # noqa: ARG002
        """There is no other."""
        return False

    @property
    def memory_share(self) -> float:
        """That of the engine's Redis."""
        return self._client.memory_share

    async def run(self) -> None:
        """Read the log of the engine until cancelled."""
        await self._client.run()
