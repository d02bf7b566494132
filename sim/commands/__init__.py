"""The commands, thin: parse, call, show."""
