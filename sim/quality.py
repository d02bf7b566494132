"""`python -m sim.quality`: a table of models' scores joined with simulated throughput and memory."""

from sim.commands.command import run_command

if __name__ == "__main__":
    run_command("sim.commands.quality")
