"""From schedules and programs to a graph of tasks and its times."""
