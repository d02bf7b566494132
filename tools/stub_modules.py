"""Imports a package without those that it needs: modules that are not installed are replaced by ones that have
everything."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any, ClassVar
from unittest.mock import MagicMock


class Stub(types.ModuleType):
    """A module that has everything."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, MagicMock(name=name))
        return getattr(self, name)


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stubs for packages that are not installed."""

    packages: ClassVar[set[str]] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        known = name.split(".")[0] in self.packages
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: Any) -> Stub:
        made = Stub(spec.name)
        made.__path__ = []
        return made

    def exec_module(self, module: Any) -> None:
        pass


def import_with_stubs(source: str, *names: str) -> None:
    """Import modules of one package, whose sources lie in the folder `source`.

    Raises:
        ModuleNotFoundError: if the package itself is not there.
    """
    import torch._dynamo  # noqa: F401  before stubs replace what torch looks for

    own = names[0].split(".")[0]
    sys.path.insert(0, source)
    sys.meta_path.append(Stubs())
    while True:
        try:
            for name in names:
                importlib.import_module(name)
        except ModuleNotFoundError as missing:
            package = str(missing.name).split(".")[0]
            if package == own or package in Stubs.packages:
                raise
            Stubs.packages.add(package)
            for name in [name for name in sys.modules if name.split(".")[0] == own]:
                del sys.modules[name]
        else:
            return
