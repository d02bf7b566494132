"""Serving: the operators of one iteration on one rank."""
