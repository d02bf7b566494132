"""Measurements of this machine and real runs of the parallel schemes. No other package of the project imports torch."""

import sys

from sim.commands.command import wrong_preset_exits

# Most commands here are their own `__main__` and load presets before they can catch an error. A program that imports
# this package and has set its own hook keeps that hook.
if sys.excepthook is sys.__excepthook__:
    sys.excepthook = wrong_preset_exits
