"""Finds out whether the hub can be reached, or a model must come from the cache."""

from huggingface_hub import constants, get_session, try_to_load_from_cache

from shared.errors import ModelUnsupported
from shared.logs import EventLog

_TIMEOUT_S = 5.0

log = EventLog(__name__)


def only_cached(model: str) -> bool:
    """Whether a model must come from the cache, because the hub cannot be reached.

    Sends one short request, because the hub's own client would retry for each file.

    Args:
        model: hub id.

    Raises:
        ModelUnsupported: the hub cannot be reached, and the model is not in the cache.
    """
    is_cached = isinstance(try_to_load_from_cache(model, "config.json"), str)
    if constants.HF_HUB_OFFLINE:
        reason = "HF_HUB_OFFLINE is set"
    else:
        url = f"{constants.ENDPOINT}/{model}/resolve/main/config.json"
        try:
            get_session().head(url, timeout=_TIMEOUT_S)
        except Exception as error:  # the hub's library chooses the HTTP client and its errors
            reason = f"{constants.ENDPOINT} cannot be reached ({error})"
        else:
            return False
    if not is_cached:
        raise ModelUnsupported(
            f"{model}: there is no such folder, the model is not in the cache, and {reason}"
        )
    log.warning("model comes from the cache", model=model, because=reason)
    return True
