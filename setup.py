"""The packages: those found by name, and the shipped scenarios, which stand at the top of a checkout."""

from setuptools import find_namespace_packages, setup

FOUND = find_namespace_packages(include=["sim*", "topology*", "calibrate*"])
setup(packages=[*FOUND, "sim.scenarios"], package_dir={"sim.scenarios": "scenarios"})
