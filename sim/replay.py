"""`python -m sim.replay`: recorded traces, as they are and with something changed."""

from sim.commands.command import run_command

if __name__ == "__main__":
    run_command("sim.commands.replay")
