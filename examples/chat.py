"""A conversation: each answer becomes part of what the model reads next.

python examples/chat.py [MODEL] [--tokens N]
"""

from __future__ import annotations

import argparse

import pronk

QUESTIONS = ["What do cows eat?", "How many stomachs does one have?", "Now tell me a joke about it."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2:135m")
    parser.add_argument("--tokens", type=int, default=60)
    arguments = parser.parse_args()

    llm = pronk.load(arguments.model)
    messages: list[dict[str, str]] = []  # a first one of role "system" would say how to answer
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer = llm.chat(messages, max_new_tokens=arguments.tokens)
        messages.append({"role": "assistant", "content": answer.text})
        print(f"> {question}\n{answer.text}\n")


if __name__ == "__main__":
    main()
