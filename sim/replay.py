"""`python -m sim.replay`: replay recorded traces, unchanged or with a change."""

from sim.commands.command import run_command

if __name__ == "__main__":
    run_command("sim.commands.replay")
