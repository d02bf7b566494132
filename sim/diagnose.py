"""`python -m sim.diagnose`: find the slow rank in recorded traces, who waits for it, and the gain of its repair."""

from sim.commands.command import run_command

if __name__ == "__main__":
    run_command("sim.commands.diagnose")
