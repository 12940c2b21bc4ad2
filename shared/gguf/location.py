"""Finds the GGUF file that a model's path means."""

from pathlib import Path

from shared.errors import ModelUnsupported

SUFFIX = ".gguf"


def gguf_file_of(model: str) -> Path | None:
    """The GGUF file of a model: itself, or the only one in a folder without config.json.

    Args:
        model: path of a file or folder, or a hub id.

    Raises:
        ModelUnsupported: the folder has several.
    """
    path = Path(model)
    if path.is_file():
        return path if path.suffix.lower() == SUFFIX else None
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    found = sorted(each for each in path.iterdir() if each.suffix.lower() == SUFFIX)
    if len(found) > 1:
        names = ", ".join(each.name for each in found)
        raise ModelUnsupported(f"{model}: the folder has several GGUF files; give one of {names}")
    return found[0] if found else None
