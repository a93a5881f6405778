"""The cache and the attention op in a plain torch loop, without vLLM.

A random two-layer transformer (full attention, then a sliding window) serves sequences of uneven
length, one of them cloned half way, and is compared with a computation that has no cache.
"""

import torch

from vllm_kv_columns import attention_backend as columns
from vllm_kv_columns import kv_manager as kv

VOCAB, HEADS, KV_HEADS, SIZE, WINDOW, CHUNK = 500, 6, 2, 64, 24, 32
HIDDEN, SCALE = HEADS * SIZE, SIZE**-0.5
WINDOWS = {"full": None, "sliding": WINDOW}

torch.manual_seed(0)
embed = torch.randn(VOCAB, HIDDEN)
w_in = {name: torch.randn(HIDDEN, (HEADS + 2 * KV_HEADS) * SIZE) / 40 for name in WINDOWS}
w_out = {name: torch.randn(HIDDEN, HIDDEN) / 20 for name in WINDOWS}

full = kv.LayerGroup("flat", ("full",), kv.FlatPolicy(), KV_HEADS, SIZE, "float32")
ring = kv.LayerGroup("ring", ("sliding",), kv.RingPolicy(WINDOW), KV_HEADS, SIZE, "float32")
config = kv.CacheConfig(8, 2048, CHUNK, (full, ring), page_size=4096, budget_bytes=4 << 20)
store = kv.HostStore(kv.CacheGeometry.of(config))
cache = kv.BatchedSequenceCache(config, store)


def project(x: torch.Tensor, layer: str) -> tuple[torch.Tensor, ...]:
    heads = (x @ w_in[layer]).view(len(x), -1, SIZE)
    return torch.split(heads, [HEADS, KV_HEADS, KV_HEADS], dim=1)


def step(tokens: dict[int, list[int]]) -> dict[int, torch.Tensor]:
    """Feed each column its new tokens; the logits that follow the last of them."""
    cache.declare_step([col for col, new in tokens.items() for _ in new])
    tables = kv.StepTables.of(cache.prepare_step())
    x = embed[[token for new in tokens.values() for token in new]]
    for layer, window in WINDOWS.items():
        query, key, value = project(x, layer)
        k, v = store.layer_view(layer).unbind(2)
        columns.write_slots(key, value, k, v, tables.seq_cols, tables.positions)
        heads = columns.sdpa_varlen(query, k, v, tables.seq_info, SCALE, True, window)
        x = x + heads.flatten(1) @ w_out[layer]
    cache.commit_step()
    last = torch.tensor([len(new) for new in tokens.values()]).cumsum(0) - 1
    return dict(zip(tokens, x[last] @ embed.T, strict=True))


def without_cache(tokens: list[int]) -> torch.Tensor:
    """Logits after the last token, from all tokens at once."""
    x, ones = embed[tokens], torch.ones(len(tokens), len(tokens), dtype=torch.bool)
    for layer, window in WINDOWS.items():
        q, k, v = (part.transpose(0, 1) for part in project(x, layer))
        seen = ones.tril() & ones.triu(1 - (window or len(tokens)))
        heads = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=SCALE, enable_gqa=True
        )
        x = x + heads.transpose(0, 1).flatten(1) @ w_out[layer]
    return x[-1] @ embed.T


def show(when: str) -> None:
    total = sum(cache.pos(col) for col in cache.live_columns)
    print(f"{when:18}{store.resident_bytes() // 1024:5} KiB of memory for {total} tokens")


show("at start")
texts = {cache.seq_new(): torch.randint(VOCAB, (n,)).tolist() for n in (70, 5, 33)}
logits: dict[int, torch.Tensor] = {}
while unread := {c: text[cache.pos(c) :] for c, text in texts.items() if len(text) > cache.pos(c)}:
    logits |= step({col: rest[:CHUNK] for col, rest in unread.items()})
show("prompts read")

worst = 0.0
for i in range(40):
    if i == 20:  # a clone shares its source's memory; this one goes on from the worst token
        show("before the clone")
        source = min(texts)
        clone = cache.seq_clone(source)
        texts[clone], logits[clone] = list(texts[source]), -logits[source]
        show("after the clone")
    for col, text in texts.items():
        text.append(int(logits[col].argmax()))
    logits = step({col: text[-1:] for col, text in texts.items()})
    worst = max(worst, *((logits[c] - without_cache(texts[c])).abs().max().item() for c in texts))
show("after 40 steps")

assert texts[clone] != texts[source], "the clone did not diverge"
for col in texts:
    cache.seq_rm(col)
show("at the end")
if worst > 1e-3:
    raise SystemExit(f"FAILED: logits differ by up to {worst:.1e} from those without a cache")
print(f"logits equal those without a cache: the largest difference is {worst:.1e}")
