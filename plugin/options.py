"""The plugin's options: `--additional-config '{"kv_columns": {...}}'`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["SECTION", "ColumnOptions"]

SECTION = "kv_columns"
"""Key of the plugin's section in vLLM's additional configuration."""

OS_PAGE = 4096


@dataclass(frozen=True)
class ColumnOptions:
    """What a user can set beyond vLLM's own flags; every default serves.

    Attributes:
        store: name of the column store (hook `kv_columns_stores`).
        kernel: name of the attention kernel (hook `kv_columns_kernels`).
        page_size: bytes of one page, the unit in which a column grows and the budget is counted;
            a power of two and a multiple of the OS page.
    """

    store: str = "host"
    kernel: str = "torch-sdpa"
    page_size: int = 256 * 1024

    def __post_init__(self) -> None:
        for field in fields(self):
            value, kind = getattr(self, field.name), type(field.default)
            if type(value) is not kind:
                raise ValueError(
                    f"{SECTION}.{field.name} must be of type {kind.__name__}, got {value!r}."
                )
        if self.page_size < OS_PAGE or self.page_size & (self.page_size - 1):
            raise ValueError(
                f"{SECTION}.page_size must be a power of two and at least {OS_PAGE} bytes, "
                f"got {self.page_size}."
            )

    @classmethod
    def of(cls, additional_config: object) -> "ColumnOptions":
        """Read the options from vLLM's `additional_config`.

        Raises:
            ValueError: a key that is not known, or a value of the wrong type or range.
        """
        section: Any = (
            additional_config.get(SECTION, {}) if isinstance(additional_config, Mapping) else {}
        )
        if not isinstance(section, Mapping):
            raise ValueError(f"{SECTION} must be a JSON object of options, got {section!r}.")
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(section) - set(known))
        if unknown:
            raise ValueError(
                f"Unknown option {', '.join(map(repr, unknown))} in {SECTION}; "
                f"known options: {', '.join(known)}."
            )
        return cls(**section)
