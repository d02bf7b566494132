"""Training frameworks: one record for each, of the facts in which they differ."""
