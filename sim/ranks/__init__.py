"""Who does what: the mesh of ranks, their groups and stages, which ranks are equal, and their faults."""
