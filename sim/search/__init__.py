"""Search for the best layouts: the space of layouts, lower bounds of time and memory, best-first search."""
