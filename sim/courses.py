"""`python -m sim.courses`: the rows of the lecture decks, and what shows them."""

from sim.commands.command import run_command

if __name__ == "__main__":
    run_command("sim.commands.courses")
