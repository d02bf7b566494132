"""Price operators and messages in seconds: profiles, roofline, interpolation, topology."""
