"""Measurements of the machine at hand and real runs of the parallel schemes. The only importer of torch."""

import sys

from sim.commands.command import wrong_preset_exits

# Most commands here are their own `__main__` and load presets before they can catch anything. A program that imports
# this package and has a hook of its own keeps it.
if sys.excepthook is sys.__excepthook__:
    sys.excepthook = wrong_preset_exits
