"""Prints requirements of pyproject.toml, one per line: requirements.py PYPROJECT [GROUP ...].

It prints those that every service needs, then those of the named groups.
"""

import sys
import tomllib
from pathlib import Path


def main() -> None:
    """Read the file and print its requirements."""
    project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
    groups = [project["optional-dependencies"][name] for name in sys.argv[2:]]
    for requirement in (*project["dependencies"], *(line for group in groups for line in group)):
        print(requirement)


if __name__ == "__main__":
    main()
