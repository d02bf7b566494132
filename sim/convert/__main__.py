"""`python -m sim.convert`: another trainer's configuration as a scenario."""

from sim.commands.command import run_command

if __name__ == "__main__":
    run_command("sim.commands.convert")
