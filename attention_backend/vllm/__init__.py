"""The attention backend `SDPA_VARLEN` as vLLM sees it."""
