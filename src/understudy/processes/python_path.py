"""Python paths: imports "module:name", a world, policy, reward or arm of the user's, also from the current directory.

The `understudy` command is a script of the environment, so Python does not look for modules in the directory that it
is run in. `find_module` adds that directory at the end of the import path, and only when a name with a colon asks for a
module that is there and nowhere else: a file of the directory never replaces a module that is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from understudy.core import UnderstudyError


def find_module(module: str) -> bool:
    """Whether a module can be imported; one that is only in the current directory can be from now on."""
    if not all(part.isidentifier() for part in module.split(".")):
        return False
    if module in sys.modules or _is_importable(module):
        return True
    importlib.invalidate_caches()  # the file may be newer than what Python remembers of its directory
    here = str(Path.cwd())
    if here in sys.path or PathFinder.find_spec(module.partition(".")[0], [here]) is None:
        return False
    sys.path.append(here)
    if _is_importable(module):
        return True
    sys.path.remove(here)
    return False


def import_object(path: str, error: type[UnderstudyError]) -> Any:
    """The object that "module:name" names; `error` says where it was looked for."""
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise error(f"expected module:name, such as my_file:my_function for my_file.py, got {path!r}")
    if not find_module(module):
        raise error(f"{path}: {missing(module)}")
    try:
        found: Any = importlib.import_module(module)
    except (ImportError, SyntaxError) as reason:
        raise error(f"{path}: {module} cannot be imported ({type(reason).__name__}: {reason})") from reason
    for part in name.split("."):
        if not hasattr(found, part):
            raise error(f"{path}: {_file_of(module)} has no {part!r}{_shadowed(module)}")
        found = getattr(found, part)
    return found


def missing(module: str) -> str:
    """Where a module was looked for, in words."""
    file = f"{module.replace('.', '/')}.py"
    return (
        f"there is no module {module!r}, neither {file} in {Path.cwd()} nor on Python's import path; "
        f"run the command in the directory of {file}"
    )


def _is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _file_of(module: str) -> str:
    return getattr(sys.modules[module], "__file__", None) or f"the built-in module {module}"


def _shadowed(module: str) -> str:
    """Advice for a file of the current directory that has the name of a module that Python finds before it."""
    own = Path.cwd() / f"{module}.py"
    if own.exists() and Path(_file_of(module)).resolve() != own.resolve():
        return f"; {own} has the same name and was not read: rename it"
    return ""
