"""The packages: those found by name, and the shipped scenarios, which stand at the top of a checkout."""

from compileall import compile_dir

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py


class CompiledInPlace(build_py):
    """Compile the modules of an editable installation, which pip leaves to their first import.

    Where PYTHONDONTWRITEBYTECODE is set, as in many container images, each start would compile them anew, which takes
    longer than most simulations.
    """

    def run(self) -> None:
        """Build as usual, then write the byte code beside the sources."""
        super().run()
        if self.editable_mode:
            for package in ("sim", "topology", "calibrate"):
                compile_dir(package, quiet=1)


FOUND = find_namespace_packages(include=["sim*", "topology*", "calibrate*"])
setup(
    packages=[*FOUND, "sim.scenarios"],
    package_dir={"sim.scenarios": "scenarios"},
    cmdclass={"build_py": CompiledInPlace},
)
