"""Replicas of the model: what each does, which request goes to which, how many run."""
