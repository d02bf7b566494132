"""`python -m sim.validate`: published measurements, predicted."""

from sim.commands.command import run_command

if __name__ == "__main__":
    run_command("sim.commands.validate")
