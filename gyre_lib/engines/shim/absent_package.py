"""A package that can be imported and decorated with, but does nothing: stands in for one whose code is never reached on CPU.

`import pkg.a.b`, `from pkg.a import Name`, `@pkg.jit`, `@pkg.jit(key=1)`, `class X(pkg.Base)` and `pkg.Enum.MEMBER` all work.
Written against the import sites of sglang 0.5.23; SGLang's version is pinned for that reason.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _AttributeNames(type):
    """Metaclass of the stand-in classes: any attribute is its own dotted name, which is enough for enum members."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class AbsentModule(ModuleType):
    """Attributes come into being on first use: Capitalised ones are classes, others are modules that also work as decorators."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        dotted = f"{self.__name__}.{name}"
        if name[0].isupper():
            value: Any = _AttributeNames(name, (), {"__init__": lambda self, *args, **kwargs: None, "__module__": self.__name__})
        else:
            value = sys.modules.get(dotted)
            if value is None:
                value = sys.modules[dotted] = AbsentModule(dotted)
                value.__spec__ = ModuleSpec(dotted, None, is_package=True)
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **options: Any) -> Any:
        used_bare = len(args) == 1 and not options and callable(args[0])
        return args[0] if used_bare else lambda decorated: decorated


class _Submodules(MetaPathFinder, Loader):
    """Finds every submodule of the packages declared absent."""

    def __init__(self) -> None:
        self.packages: set[str] = set()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, rest = fullname.partition(".")
        return ModuleSpec(fullname, self, is_package=True) if rest and package in self.packages else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules.get(spec.name) or AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        parent, _, child = module.__name__.rpartition(".")
        setattr(sys.modules[parent], child, module)


_submodules = _Submodules()


def declare_absent(package: str, version: str, **really_needed: Any) -> None:
    """Replace `package` in sys.modules by a stand-in; `really_needed` are attributes that have to compute something."""
    if _submodules not in sys.meta_path:
        sys.meta_path.insert(0, _submodules)
    _submodules.packages.add(package)
    module = AbsentModule(package)
    module.__spec__ = ModuleSpec(package, None, is_package=True)
    for name, value in {"__version__": version, **really_needed}.items():
        setattr(module, name, value)
    sys.modules[package] = module
