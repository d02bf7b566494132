"""Compute when each task of a graph runs, with shared links where they matter."""
