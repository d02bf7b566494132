"""`python -m sim.regress`: stored real runs against their simulation."""

from sim.commands.command import run_command

if __name__ == "__main__":
    run_command("sim.commands.regress")
