"""Parallelism schemes on real ranks, one file for each scheme."""
