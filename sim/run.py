"""`python -m sim.run`: simulate a step or a serving workload."""

from sim.commands.command import run_command

if __name__ == "__main__":
    run_command("sim.commands.run")
