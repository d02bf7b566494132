"""Launch scripts and job files, read as text and never run."""
