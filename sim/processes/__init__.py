"""Processes of one's own beside a step: what `cluster` offers them, and those that are shipped (`examples`)."""
