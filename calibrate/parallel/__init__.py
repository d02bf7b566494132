"""One readable file per parallelism scheme, run on real ranks."""
