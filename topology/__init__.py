"""Network topology: GPUs, switches and links; routes and collective times. No import of sim or calibrate."""
