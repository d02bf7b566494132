"""Captures the ranks of a distributed script: torch.distributed without other ranks, messages and waits."""
