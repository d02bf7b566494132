"""Values of fake tensors that are known, and right answers where code asks for others."""
