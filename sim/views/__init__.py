"""Pages, traces and summaries made from a Timeline."""
