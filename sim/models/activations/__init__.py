"""Activation functions of MLPs: facts of each, and their kernels."""
