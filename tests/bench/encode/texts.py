"""Which texts do the benches of the engine read? Docstrings of the standard library."""

import importlib
import inspect
import pkgutil
import sys
import warnings

_LONGEST = 2000  # characters
_SHORTEST = 20
_LEFT_OUT = ("_", "idle", "antigravity", "this", "turtle", "tkinter", "lib2to3", "test")


def docstrings(count: int) -> list[str]:
    """Different docstrings of the standard library's modules, cut, in a fixed order."""
    found: dict[str, None] = {}
    for module in sorted(pkgutil.iter_modules(), key=lambda module: module.name):
        if module.name not in sys.stdlib_module_names or module.name.startswith(_LEFT_OUT):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                loaded = importlib.import_module(module.name)
            except ImportError:
                continue
        for name in sorted(vars(loaded)):
            text = inspect.getdoc(vars(loaded)[name])
            if text and len(text) > _SHORTEST:
                found.setdefault(text[:_LONGEST])
            if len(found) == count:
                return list(found)
    return list(found)
