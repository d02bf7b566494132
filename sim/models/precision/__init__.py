"""Number formats in a step: recipes of 8 and 4 bits, quantizing, casts, autocast."""
