"""`python -m sim.diagnose`: which recorded rank is slow, who waits for it, and what its repair would gain."""

from sim.commands.command import run_command

if __name__ == "__main__":
    run_command("sim.commands.diagnose")
