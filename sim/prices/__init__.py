"""What operators and messages take: profiles, roofline, interpolation, topology."""
