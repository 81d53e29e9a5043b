"""Registry: the kinds of policies that are one file and follow instructions, by the name that the file has of its kind.

Other packages add theirs by an entry point, whose name is the kind and whose value is the class:

    [project.entry-points."understudy.policies"]
    my_kind = "my_package.policy:MyPolicy"
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from understudy.core.suggestion import did_you_mean
from understudy.policies.protocol import PolicyError

GROUP = "understudy.policies"
BUILT_IN = {"vla": "understudy.policies.vla:VLAPolicy", "flow": "understudy.policies.flow:FlowPolicy"}


def kinds() -> tuple[str, ...]:
    """The names of all kinds, those of this package first."""
    return (*BUILT_IN, *sorted(_registered()))


def policy_class(kind: str) -> Any:
    """The class of a kind. It has `load`, as `VLAPolicy` has, and gives a `BlockPolicy`."""
    if kind in BUILT_IN:
        module, _, name = BUILT_IN[kind].partition(":")
        return getattr(import_module(module), name)
    registered = _registered()
    if kind not in registered:
        advice = did_you_mean(kind, kinds(), f"install the package that made it (entry points {GROUP!r})")
        raise PolicyError(f"kind: expected a policy of kind {', '.join(kinds())}, got {kind!r}; {advice}")
    point = registered[kind]
    try:
        found = point.load()
    except (ImportError, AttributeError) as error:
        raise PolicyError(
            f"kind: {kind!r} is registered as {point.value}, which cannot be imported ({error}); install it again"
        ) from error
    if not callable(getattr(found, "load", None)):
        raise PolicyError(
            f"kind: {kind!r} is registered as {point.value}, which has no `load(path, spec, *, device)`; give it one"
        )
    return found


def _registered() -> dict[str, EntryPoint]:
    """The entry points of other packages by name; a name that two have is refused."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        other = found.get(point.name)
        taken = BUILT_IN.get(point.name) or (other.value if other is not None and other != point else None)
        if taken is not None:
            raise PolicyError(
                f"kind: {point.name!r} is registered as {taken} and as {point.value}; remove one of the packages"
            )
        found[point.name] = point
    return found
