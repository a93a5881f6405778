"""Hooks through which stores and attention kernels are found, the built-in ones included.

A distribution adds its own by an entry point in the group ``vllm_kv_columns`` that names a module
(or object) with ``@hookimpl`` functions of the two names below.
"""

import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

import pluggy

from .errors import ConfigError

if TYPE_CHECKING:
    from ..attention_backend.kernel import AttentionKernel
    from .stores.base import ColumnStore

__all__ = [
    "PROJECT",
    "hookimpl",
    "hookspec",
    "kernel_class",
    "kv_columns_kernels",
    "kv_columns_stores",
    "load_entry_points",
    "new_plugin_manager",
    "plugin_manager",
    "store_class",
]

PROJECT = "vllm_kv_columns"  # of the hooks, and the entry-point group
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def kv_columns_stores() -> Mapping[str, type["ColumnStore"]]:
    """Column stores by name. A name may be given by one plugin only."""
    raise NotImplementedError


@hookspec
def kv_columns_kernels() -> Mapping[str, type["AttentionKernel"]]:
    """Attention kernels by name. A name may be given by one plugin only."""
    raise NotImplementedError


def new_plugin_manager() -> pluggy.PluginManager:
    """A manager that knows the hooks and no plugin yet."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(sys.modules[__name__])
    return manager


def load_entry_points(manager: pluggy.PluginManager) -> None:
    """Load and register every entry point of the group.

    Raises ConfigError that names the entry point which cannot be loaded or registered.
    """
    for entry in entry_points(group=PROJECT):
        owner = entry.dist.name if entry.dist is not None else "an unnamed distribution"
        try:
            manager.register(entry.load(), name=f"{owner}:{entry.name}")
            manager.check_pending()
        except Exception as error:
            raise ConfigError(
                f"entry point {entry.name!r} = {entry.value!r} (group {PROJECT!r}) of {owner} "
                f"cannot be loaded: {error}; fix or uninstall {owner}"
            ) from error


@cache
def plugin_manager() -> pluggy.PluginManager:
    """The process-wide manager, with all entry points loaded on the first call."""
    manager = new_plugin_manager()
    load_entry_points(manager)
    return manager


def store_class(name: str, manager: pluggy.PluginManager | None = None) -> type["ColumnStore"]:
    """The store registered as ``name``; ConfigError lists the known names otherwise."""
    from .stores.base import ColumnStore

    found = _lookup("kv_columns_stores", "store", name, ColumnStore, manager)
    assert issubclass(found, ColumnStore)
    return found


def kernel_class(name: str, manager: pluggy.PluginManager | None = None) -> type["AttentionKernel"]:
    """The kernel registered as ``name``; ConfigError lists the known names otherwise."""
    from ..attention_backend.kernel import AttentionKernel

    found = _lookup("kv_columns_kernels", "attention kernel", name, AttentionKernel, manager)
    assert issubclass(found, AttentionKernel)
    return found


def _lookup(
    hook: str, noun: str, name: str, base: type, manager: pluggy.PluginManager | None
) -> type:
    manager = manager or plugin_manager()
    found: dict[str, tuple[str, type]] = {}
    for impl in getattr(manager.hook, hook).get_hookimpls():
        for key, value in impl.function().items():
            if key in found:
                raise ConfigError(
                    f"{noun} {key!r} is registered by {found[key][0]!r} and by "
                    f"{impl.plugin_name!r}; uninstall or rename one of them"
                )
            if not (isinstance(value, type) and issubclass(value, base)):
                raise ConfigError(
                    f"{noun} {key!r} of {impl.plugin_name!r} is {value!r}; "
                    f"it must be a subclass of {base.__name__}"
                )
            found[key] = (impl.plugin_name, value)
    if name not in found:
        known = ", ".join(sorted(found)) or "none"
        raise ConfigError(f"unknown {noun} {name!r}; known are: {known}")
    return found[name][1]
