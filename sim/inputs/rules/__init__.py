"""Rules between a scenario's keys: what is legal together, and which keys have no effect."""
