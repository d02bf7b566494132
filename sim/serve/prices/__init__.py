"""Seconds of one serving iteration."""
