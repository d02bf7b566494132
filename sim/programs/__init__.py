"""Programs of a stage's actions, each compiled once to tasks on streams."""
