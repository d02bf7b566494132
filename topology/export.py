"""`python -m topology.export`: a cluster's network as a file; the command stands with the others in sim/commands."""

from importlib import import_module  # by name: topology imports nothing of sim, and only this command starts in it

if __name__ == "__main__":
    import_module("sim.commands.command").run_command("sim.commands.topology")
