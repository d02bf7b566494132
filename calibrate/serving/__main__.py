"""Runs `python -m calibrate.serving`."""

from sim.commands.command import run_command

if __name__ == "__main__":
    run_command("calibrate.serving.running")
