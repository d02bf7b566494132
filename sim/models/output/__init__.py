"""What stands behind the last layer: output matrix, losses, prediction of further tokens, references."""
