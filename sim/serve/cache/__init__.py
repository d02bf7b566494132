"""Keys and values that a replica keeps: blocks, shared prefixes, tiers below the GPU's memory."""
