"""`python -m sim.map`: the best layout for each model size and GPU count."""

from sim.commands.command import run_command

if __name__ == "__main__":
    run_command("sim.commands.map")
