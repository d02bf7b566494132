"""Records that a key of a scenario names: frameworks, engines, optimizers, recipes, activations, dispatchers, code."""
