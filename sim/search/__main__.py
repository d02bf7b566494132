"""`python -m sim.search`: the best layouts that fit in memory."""

from sim.commands.command import run_command

if __name__ == "__main__":
    run_command("sim.commands.search")
