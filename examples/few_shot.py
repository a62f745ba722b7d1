"""Few-shot: a handful of solved cases in the prompt show the model what to do with the next one.

All questions on one list of cases go through the model together, as one batch. A line's end ends the answer.

python examples/few_shot.py [MODEL] [--tokens N]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pronk

PROMPTS = Path(__file__).parent / "prompts" / "few_shot"
QUESTIONS = {
    "opposites": ["early", "dark", "open"],
    "mood": ["I lost my new umbrella on the train.", "Grandma baked my favourite cake.", "The dog is ill."],
    "plural": ["dog", "fox", "party"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2:135m")
    parser.add_argument("--tokens", type=int, default=8)
    arguments = parser.parse_args()

    llm = pronk.load(arguments.model)
    for name, questions in QUESTIONS.items():
        cases = (PROMPTS / f"{name}.txt").read_text(encoding="utf-8").rstrip("\n")
        prompts = [cases.format(question) for question in questions]
        answers = llm.generate(prompts, max_new_tokens=arguments.tokens, stop=("\n",))
        print(f"--- {name}")
        for question, answer in zip(questions, answers, strict=True):
            print(f"{question} -> {answer.text.strip()}")
        print()


if __name__ == "__main__":
    main()
