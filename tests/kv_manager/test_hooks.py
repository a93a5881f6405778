"""Stores and kernels are found through the hooks; each failure names its cause."""

from importlib.metadata import EntryPoint, EntryPoints, entry_points
from types import SimpleNamespace

import pluggy
import pytest

from vllm_kv_columns.kv_manager import (
    ColumnStore,
    ConfigError,
    CudaVmmStore,
    DenseStore,
    HostStore,
    hooks,
    stores,
)


class ThirdPartyStore(DenseStore):
    pass


def plugin_of(name: str, value: object) -> SimpleNamespace:
    def kv_columns_stores() -> dict[str, object]:
        return {name: value}

    return SimpleNamespace(kv_columns_stores=hooks.hookimpl(kv_columns_stores))


@pytest.fixture
def manager() -> pluggy.PluginManager:
    manager = hooks.new_plugin_manager()
    manager.register(stores, name="builtin")
    return manager


@pytest.mark.parametrize(
    ("name", "cls"), [("host", HostStore), ("dense", DenseStore), ("cuda-vmm", CudaVmmStore)]
)
def test_built_in_stores_come_through_the_hook(
    manager: pluggy.PluginManager, name: str, cls: type[ColumnStore]
) -> None:
    assert hooks.store_class(name, manager) is cls


def test_a_store_of_somebody_else_is_found(manager: pluggy.PluginManager) -> None:
    manager.register(plugin_of("theirs", ThirdPartyStore), name="third")
    assert hooks.store_class("theirs", manager) is ThirdPartyStore


def test_an_unknown_name_lists_the_known_ones(manager: pluggy.PluginManager) -> None:
    with pytest.raises(ConfigError, match="unknown store 'cuda'; known are: cuda-vmm, dense, host"):
        hooks.store_class("cuda", manager)


def test_one_name_from_two_plugins_names_both(manager: pluggy.PluginManager) -> None:
    manager.register(plugin_of("host", ThirdPartyStore), name="third")
    with pytest.raises(ConfigError, match=r"store 'host' is registered by '(third|builtin)' and"):
        hooks.store_class("dense", manager)


@pytest.mark.parametrize("value", [dict, "HostStore"], ids=["other class", "no class"])
def test_something_that_is_no_store_is_refused(
    manager: pluggy.PluginManager, value: object
) -> None:
    manager.register(plugin_of("odd", value), name="third")
    with pytest.raises(ConfigError, match=r"'odd' of 'third' is .* must be a subclass of ColumnSt"):
        hooks.store_class("host", manager)


def test_kernels_have_a_hook_of_their_own(manager: pluggy.PluginManager) -> None:
    with pytest.raises(ConfigError, match="unknown attention kernel 'host'; known are: none"):
        hooks.kernel_class("host", manager)


def test_a_plugin_with_a_misspelt_hook_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    misspelt = SimpleNamespace(kv_column_stores=hooks.hookimpl(lambda: {}))
    monkeypatch.setattr(EntryPoint, "load", lambda self: misspelt)
    entry_point(monkeypatch, "theirs.module")
    with pytest.raises(
        ConfigError, match=r"entry point 'theirs' .* unknown hook 'kv_column_stores'"
    ):
        hooks.load_entry_points(hooks.new_plugin_manager())


def entry_point(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    entry = EntryPoint(name="theirs", value=value, group=hooks.PROJECT)
    monkeypatch.setattr(hooks, "entry_points", lambda group: EntryPoints([entry]))


def test_entry_points_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    entry_point(monkeypatch, stores.__name__)
    manager = hooks.new_plugin_manager()
    hooks.load_entry_points(manager)
    assert hooks.store_class("host", manager) is HostStore


def test_an_entry_point_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    entry_point(monkeypatch, "no_such_module_here")
    with pytest.raises(
        ConfigError, match=r"entry point 'theirs' = 'no_such_module_here' .* cannot"
    ):
        hooks.load_entry_points(hooks.new_plugin_manager())


def test_the_distribution_declares_its_own_stores_as_an_entry_point() -> None:
    found = {entry.name: entry for entry in entry_points(group=hooks.PROJECT)}
    assert found["builtin_stores"].load() is stores
