"""Residual streams of several streams."""
