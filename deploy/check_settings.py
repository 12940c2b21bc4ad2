"""Checks the settings of ``scripts/serve`` and exits, with 2 if one is wrong.

It needs nothing but Python itself, so that wrong settings are found before anything is installed.
"""

from deploy.serve import options_or_exit

if __name__ == "__main__":
    options_or_exit()
