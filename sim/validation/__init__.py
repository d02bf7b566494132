"""Tables of published measurements: reading them, predicting their rows, statistics of the errors."""
