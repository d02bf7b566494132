"""What of the activations is kept for the backward, run again, or put into host memory."""
