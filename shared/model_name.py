"""The name that clients give for a model, and where its files are."""

from pathlib import Path

from shared.gguf.location import SUFFIX


def model_name(model: str, served_model_name: str | None) -> str:
    """The name given, else the last part of the model's path or hub id."""
    return served_model_name or model.rstrip("/").rpartition("/")[2].removesuffix(SUFFIX)


def model_root(model: str) -> str:
    """What any process loads a model from: the absolute path of a folder or file, or a hub id."""
    path = Path(model).expanduser()
    return str(path.absolute()) if path.exists() else model
