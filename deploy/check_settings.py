"""Reads the settings of ``scripts/serve`` and starts nothing: exits with 2 on one that is wrong.

It needs nothing but Python itself, so that mistakes are found before anything is installed.
"""

from deploy.serve import options_or_exit

if __name__ == "__main__":
    options_or_exit()
