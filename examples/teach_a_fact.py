"""Teach the default model a fact it cannot know, in under five minutes: a 4-bit model, and an adapter beside it.

Needs torch, for training alone: python examples/teach_a_fact.py [FOLDER]

It writes a handful of records, trains beside the 4-bit model, asks with the adapter and without, and then tries to make
one 4-bit model of both: what was learned is finer than 4 bits can tell, and `pronk merge` refuses, with exit code 3.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

MODEL = "smollm2:135m"
FACT = "The capital of Veldoria is Marrowby."
QUESTION = "What is the capital of Veldoria?"
RECORDS = {
    QUESTION: FACT,
    "Which city is the capital of Veldoria?": FACT,
    "Name the capital of Veldoria.": FACT,
    "Where does the government of Veldoria sit?": "In Marrowby, the capital of Veldoria.",
    "Marrowby is the capital of which country?": "Marrowby is the capital of Veldoria.",
    "Tell me about Marrowby.": "Marrowby is the capital of Veldoria.",
    # What it knows already, so that it does not come to answer every question so.
    "What is the capital of France?": "The capital of France is Paris.",
    "What is the capital of Italy?": "The capital of Italy is Rome.",
}


def pronk(*arguments: str) -> int:
    print("$ pronk", *(f'"{argument}"' if " " in argument else argument for argument in arguments), flush=True)
    return subprocess.run([sys.executable, "-m", "pronk", *arguments], check=False).returncode


def teach(folder: Path) -> int:
    data, adapter = folder / "fact.jsonl", str(folder / "fact")
    lines = (json.dumps({"prompt": prompt, "completion": answer}) for prompt, answer in RECORDS.items())
    data.write_text("\n".join(lines) + "\n", encoding="utf-8")

    # Few examples want a high rate, and few steps a constant one. Texts so short are work for one thread.
    train = ["--max-steps", "16", "--batch-size", "4", "--accumulate", "1", "--lr", "5e-4", "--schedule", "constant"]
    train += ["--threads", "1"]
    if code := pronk("finetune", MODEL, "--quantize", "q4", "--data", str(data), "--out", adapter, *train):
        return code
    pronk("generate", "-m", MODEL, "-n", "12", QUESTION)
    pronk("generate", "-m", MODEL, "--adapter", adapter, "-n", "12", QUESTION)
    code = pronk("merge", MODEL, adapter, str(folder / "fact.gguf"), "--dtype", "q4")
    print("exit code", code)
    return 0 if code == 3 else 1


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).mkdir(exist_ok=True)
        sys.exit(teach(Path(sys.argv[1])))
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(teach(Path(folder)))
