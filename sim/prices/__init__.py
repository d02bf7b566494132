"""Prices in seconds of operators and messages: profiles, roofline, interpolation, topology."""
