"""`python -m sim.compare`: simulated against measured."""

from sim.commands.command import run_command

if __name__ == "__main__":
    run_command("sim.commands.compare")
