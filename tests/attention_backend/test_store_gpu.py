"""Attention over a store on the GPU while other columns of it grow and shrink."""

import os
import threading
import time

import pytest
import torch

from vllm_kv_columns.attention_backend import sdpa_varlen_reference
from vllm_kv_columns.attention_backend.triton import TritonKernel
from vllm_kv_columns.kv_manager import (
    CacheConfig,
    CacheGeometry,
    CudaVmmStore,
    FlatPolicy,
    LayerGroup,
    RingPolicy,
    StepTables,
)

pytestmark = pytest.mark.gpu

SECONDS = 3 if os.environ.get("KV_COLUMNS_GPU_SMALL", "0") != "0" else 4
HEADS, GROUP, SIZE, WINDOW = 4, 4, 64, 256
LENGTHS = {1: 700, 2: 1, 3: 1500}
# q_len and column of each segment
STEPS = {
    "decodes": [(1, 1), (1, 2), (2, 3)],
    "drafts": [(1, 1), (1, 2), (7, 3)],
    "prompt": [(1, 2), (300, 3)],
}


def geometry() -> CacheGeometry:
    def group(name: str, policy: FlatPolicy | RingPolicy) -> LayerGroup:
        return LayerGroup(name, (f"{name}.0", f"{name}.1"), policy, HEADS, SIZE, "bfloat16")

    return CacheGeometry.of(
        CacheConfig(
            max_seqs=8,
            capacity=1 << 15,
            max_write=2048,
            groups=(group("flat", FlatPolicy()), group("ring", RingPolicy(WINDOW))),
            page_size=2 << 20,
            budget_bytes=4 << 30,
        )
    )


@pytest.mark.parametrize("kind", STEPS)
def test_memcheck_attention_while_other_columns_grow_and_shrink(kind: str) -> None:
    ends = STEPS[kind]
    torch.manual_seed(0)
    with CudaVmmStore(geometry(), spare_bytes=0) as store:
        store.prepare_writes({col: (0, end) for col, end in LENGTHS.items()})
        rows = {layer: store.geometry.region_of(layer).rows for layer in store.geometry.layers}
        for layer, count in rows.items():
            for col, end in LENGTHS.items():
                store.layer_view(layer)[: min(end, count), col].normal_()
        info, start = [], 0
        for q_len, col in ends:
            info.append((start, q_len, col, LENGTHS[col]))
            start += q_len
        none = torch.empty(0, dtype=torch.int32, device="cuda")
        tables = StepTables(torch.tensor(info, dtype=torch.int32, device="cuda"), none, none)
        query = torch.randn(start, HEADS * GROUP, SIZE, device="cuda", dtype=torch.bfloat16)
        windows = {layer: WINDOW if layer.startswith("ring") else None for layer in rows}
        views = {layer: store.layer_view(layer) for layer in rows}
        expected = {
            layer: sdpa_varlen_reference(
                query,
                view[:, :, 0],
                view[:, :, 1],
                tables.seq_info,
                scale=0.1,
                window=windows[layer],
            )
            for layer, view in views.items()
        }
        torch.cuda.synchronize()

        stop, failures = threading.Event(), []

        def change() -> None:
            turn = 0
            try:
                while not stop.is_set():
                    turn += 1
                    for col in (4, 5, 6):
                        store.prepare_write(col, 0, 1 + 977 * turn * col % (1 << 15))
                        store.layer_view("flat.0")[0, col] = float("nan")
                        store.shrink(col, 100)
                        if (turn + col) % 2:
                            store.release(col)
            except BaseException as error:
                failures.append(repr(error))

        thread = threading.Thread(target=change)
        thread.start()
        kernels = {layer: TritonKernel() for layer in rows}
        rounds = 0
        try:
            until = time.monotonic() + SECONDS
            while time.monotonic() < until and not failures:
                for layer, count in rows.items():
                    out = torch.full_like(query, float("nan"))
                    step = kernels[layer].prepare(
                        tables,
                        rows=count,
                        window=windows[layer],
                        causal=True,
                        max_q_len=max(q_len for q_len, _ in ends),
                    )
                    key_cache, value_cache = views[layer][:, :, 0], views[layer][:, :, 1]
                    kernels[layer].attend(query, key_cache, value_cache, step, scale=0.1, out=out)
                    torch.testing.assert_close(out, expected[layer], rtol=0, atol=0.03)
                rounds += 1
        finally:
            stop.set()
            thread.join(60)
        print(f"\n{rounds} rounds, {store.stats()}")
        assert not failures and not thread.is_alive()
        assert rounds > 0 and store.stats().unmapped_pages > 0
