"""A store of a third party: the host store, which also writes down what it was asked to back."""

from vllm_kv_columns.kv_manager import CacheGeometry, HostStore, hookimpl


class TinyStore(HostStore):
    def __init__(self, geometry: CacheGeometry) -> None:
        self.asked: list[tuple[int, int, int]] = []
        super().__init__(geometry)

    def prepare_write(self, col: int, start: int, end: int) -> None:
        self.asked.append((col, start, end))
        super().prepare_write(col, start, end)


@hookimpl
def kv_columns_stores() -> dict[str, type[TinyStore]]:
    return {"tiny": TinyStore}
