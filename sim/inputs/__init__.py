"""What users write: scenarios, their keys, rules and refusals."""
