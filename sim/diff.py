"""`python -m sim.diff`: two scenarios or results, side by side."""

from sim.commands.command import run_command

if __name__ == "__main__":
    run_command("sim.commands.diff")
