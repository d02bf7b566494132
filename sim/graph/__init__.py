"""Build a graph of tasks from schedules and programs."""
