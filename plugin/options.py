"""The plugin's options: `--additional-config '{"kv_columns": {...}}'`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["SECTION", "ColumnOptions"]

SECTION = "kv_columns"
"""Key of the plugin's section in vLLM's additional configuration."""

OS_PAGE = 4096

CUDA_DEFAULTS = {
    "store": "cuda-vmm",
    "kernel": "triton",
    "page_size": 2 << 20,  # the driver's smallest
    "ahead_rows": 16,
}
"""What differs on a GPU from the defaults of the fields below, which are those of the CPU."""


@dataclass(frozen=True)
class ColumnOptions:
    """What a user can set beyond vLLM's own flags; every default serves.

    Attributes:
        store: name of the column store (hook `kv_columns_stores`).
        kernel: name of the attention kernel (hook `kv_columns_kernels`).
        page_size: bytes of one page, the unit in which a column grows and the budget is counted;
            a power of two and a multiple of the OS page.
        ahead_rows: rows backed beyond the last token, so that a decode step finds them there.
        spare_bytes: idle physical memory that the store may keep for reuse.
        layers_per_region: most layers that share one stretch of addresses; 0 for all of a kind.
        retained: columns beyond one for each running sequence, in which what ended sequences
            computed is kept for prompts that begin with it; -1 for three for each sequence.
        retain_seconds: how long it is kept while nothing is running.
    """

    store: str = "host"
    kernel: str = "torch-sdpa"
    page_size: int = 256 * 1024
    ahead_rows: int = 0
    spare_bytes: int = 256 << 20
    layers_per_region: int = 0
    retained: int = -1
    retain_seconds: int = 60

    def __post_init__(self) -> None:
        for field in fields(self):
            value: Any = getattr(self, field.name)
            kind: type = type(field.default)
            if type(value) is not kind:
                raise ValueError(
                    f"{SECTION}.{field.name} must be of type {kind.__name__}, got {value!r}."
                )
            if isinstance(value, int) and value < 0 and value != field.default:
                raise ValueError(f"{SECTION}.{field.name} must not be negative, got {value}.")
        if self.page_size < OS_PAGE or self.page_size & (self.page_size - 1):
            raise ValueError(
                f"{SECTION}.page_size must be a power of two and at least {OS_PAGE} bytes, "
                f"got {self.page_size}."
            )

    def retained_columns(self, max_seqs: int) -> int:
        """Of a server of so many sequences at once."""
        return 3 * max_seqs if self.retained < 0 else self.retained

    @classmethod
    def of(cls, config: "VllmConfig") -> "ColumnOptions":
        """Read the options of a configuration; absent ones have the device's defaults.

        Raises:
            ValueError: a key that is not known, or a value of the wrong type or range.
        """
        return cls.parse(config.additional_config, config.device_config.device_type)

    @classmethod
    def parse(cls, additional_config: object, device_type: str) -> "ColumnOptions":
        """The same from vLLM's `additional_config` and the device type, such as "cuda"."""
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
        return cls(**{**(CUDA_DEFAULTS if device_type == "cuda" else {}), **section})
