"""Inputs that users write: scenarios, their keys, rules and error messages."""
