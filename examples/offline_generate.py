"""vLLM's basic offline example with the KV cache in columns: `python examples/offline_generate.py`.

Set BACKEND to None to run the same on stock vLLM.
"""

from vllm import LLM, SamplingParams

import smollm2

BACKEND = "SDPA_VARLEN"
PROMPTS = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]


def main() -> None:
    llm = LLM(
        model=str(smollm2.convert()),
        attention_backend=BACKEND,
        max_model_len=2048,
        kv_cache_memory_bytes=1 << 30,
        enforce_eager=True,
    )
    for output in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24)):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")


if __name__ == "__main__":  # the engine may be started by spawn, which imports this file again
    main()
