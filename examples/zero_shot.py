"""Zero-shot: the prompt alone says what is wanted; the model goes on from there.

python examples/zero_shot.py [MODEL] [--tokens N]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pronk

PROMPTS = Path(__file__).parent / "prompts" / "zero_shot"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2:135m")
    parser.add_argument("--tokens", type=int, default=40)
    arguments = parser.parse_args()

    llm = pronk.load(arguments.model)
    for path in sorted(PROMPTS.glob("*.txt")):
        prompt = path.read_text(encoding="utf-8").rstrip("\n")
        print(f"--- {path.stem}\n{prompt}", end="")
        for chunk in llm.stream(prompt, max_new_tokens=arguments.tokens):
            print(chunk.text, end="", flush=True)
        print("\n")


if __name__ == "__main__":
    main()
