"""Real steps and their paired calibration: what can run, blocks timed between steps, and the profile made of them."""
