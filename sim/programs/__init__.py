"""What runs: the program of a stage's action, compiled once to tasks on streams."""
