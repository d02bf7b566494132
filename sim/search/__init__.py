"""The space of layouts, bounds of their time and memory, and the best-first search over them."""
