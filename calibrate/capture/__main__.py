"""Runs `python -m calibrate.capture`."""

from calibrate.capture.command import main
from sim.commands.command import run_command

if __name__ == "__main__":
    run_command(main)
