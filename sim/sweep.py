"""`python -m sim.sweep`: a step over values of some keys."""

from sim.commands.command import run_command

if __name__ == "__main__":
    run_command("sim.commands.sweep")
