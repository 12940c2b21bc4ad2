"""Checks a Redis that the user has named, before any service starts."""

import asyncio
from collections.abc import Sequence

from shared.bus.redis_bus import RedisBus
from shared.errors import BusUnavailable, LoginRefused, PageStreamError

_START_S = 5.0  # the server may be starting as well
_RETRY_S = 0.25


def check_redis(url: str, setting: str = "REDIS_URL") -> Sequence[str]:
    """Check that the server can be used; warnings about its settings.

    Args:
        setting: that has the URL, for errors.

    Raises:
        SettingsError: the URL cannot be used.
        PageStreamError: the server cannot be reached, refuses the password, or is too old.
    """
    return asyncio.run(_check(url, setting))


async def _check(url: str, setting: str) -> Sequence[str]:
    bus = RedisBus(url, setting=setting)
    loop = asyncio.get_running_loop()
    until_s = loop.time() + _START_S
    try:
        while True:
            try:
                await bus.check_server()
                return await bus.settings_warnings()
            except LoginRefused as error:
                raise PageStreamError(f"{setting}: {error}") from None
            except BusUnavailable as error:
                if loop.time() >= until_s:
                    raise PageStreamError(f"{setting}: {error}") from None
                await asyncio.sleep(_RETRY_S)
    finally:
        await bus.close()
