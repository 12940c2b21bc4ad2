"""Whether a model's files can come from the hub."""

from huggingface_hub import constants, get_session, try_to_load_from_cache

from shared.errors import ModelUnsupported
from shared.logs import EventLog

_TIMEOUT_S = 5.0

log = EventLog(__name__)


def only_cached(model: str) -> bool:
    """Whether files have to come from the cache, since the hub cannot be reached.

    One short question, before the hub's own client asks for each file again and again.

    Args:
        model: hub id.

    Raises:
        ModelUnsupported: it cannot be reached, and nothing of the model is in the cache.
    """
    is_cached = isinstance(try_to_load_from_cache(model, "config.json"), str)
    if constants.HF_HUB_OFFLINE:
        reason = "HF_HUB_OFFLINE is set"
    else:
        url = f"{constants.ENDPOINT}/{model}/resolve/main/config.json"
        try:
            get_session().head(url, timeout=_TIMEOUT_S)
        except Exception as error:  # of whatever client the hub's library has
            reason = f"{constants.ENDPOINT} cannot be reached ({error})"
        else:
            return False
    if not is_cached:
        raise ModelUnsupported(
            f"{model}: there is no such folder, the model is not in the cache, and {reason}"
        )
    log.warning("model comes from the cache", model=model, because=reason)
    return True
