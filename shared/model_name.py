"""The name that clients give for a model."""

from shared.gguf.location import SUFFIX


def model_name(model: str, served_model_name: str | None) -> str:
    """The name given, else the last part of the model's path or hub id."""
    return served_model_name or model.rstrip("/").rpartition("/")[2].removesuffix(SUFFIX)
