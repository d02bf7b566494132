"""When it runs: a task graph's times, with links shared where that matters."""
