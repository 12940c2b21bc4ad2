"""The ``--model`` option of benchmarks: a folder or a known name, as for ``scripts/serve``."""

import argparse
import subprocess

from deploy.known_models import maker_command
from deploy.options import find_model
from shared.errors import SettingsError

MODEL_HELP = "folder of a model, or a known name: demo, smollm2"


def model_folder(model: str) -> str:
    """Path of a model's folder, which is made if it is a known model's; else the hub id.

    Raises:
        argparse.ArgumentTypeError: there is no such model, or it cannot be made.
    """
    try:
        found = find_model(model)
    except SettingsError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if command := maker_command(found):
        made = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if made.returncode:
            raise argparse.ArgumentTypeError(made.stderr.strip())
    return found
