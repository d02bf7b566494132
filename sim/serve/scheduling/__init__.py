"""Which requests compute what in an iteration of a replica."""
