"""Network topology: GPUs, switches and links; routes and collective times. Imports neither sim nor calibrate."""
