"""Times of single operators, of the host, and of computation beside communication."""
