"""Run `python -m topology.export`, which writes a cluster's network to a file (sim/commands/topology.py)."""

from importlib import import_module  # by name, because topology must not import sim; only this command does

if __name__ == "__main__":
    import_module("sim.commands.command").run_command("sim.commands.topology")
