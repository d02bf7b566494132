"""`stepsim COMMAND …`, which is also `python -m sim COMMAND …`."""

from typing import NoReturn

from sim.commands.command import run_command


def main() -> NoReturn:
    """Run the command that the command line names."""
    run_command("sim.commands.stepsim")


if __name__ == "__main__":
    main()
