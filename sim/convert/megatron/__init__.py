"""Megatron-LM's arguments, and those of its forks and of programs that pass them on."""
