"""Makes the step of a Hugging Face model from its config alone."""
