"""`python -m sim.explore`: the layout in a browser."""

from sim.commands.command import run_command

if __name__ == "__main__":
    run_command("sim.commands.explore")
