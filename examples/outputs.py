"""What the default model makes of examples/prompts: writes examples/prompts/README.md.

python examples/outputs.py [--print]
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE / "prompts" / "README.md"
HEAD = """# Prompts, and what the default model made of them

`python examples/outputs.py` wrote this page; it runs the two programs whose prompts these are. The model is
`smollm2:135m` as it comes, greedy: 135 million weights in 4 bits. It is small, and wrong as often as not: what it has learned
is the look of an answer. Models that are greedy and the same still write other texts on processors that round otherwise.
"""
PROGRAMS = {
    "zero_shot": "## Zero-shot: the prompt alone\n\nOf each text the prompt comes first; the model goes on where it ends.",
    "few_shot": "## Few-shot: solved cases, and one to solve\n\nThe cases are in [few_shot](few_shot); these are the answers.",
}


def page() -> str:
    parts = [HEAD]
    for program, words in PROGRAMS.items():
        command = [sys.executable, str(HERE / f"{program}.py")]
        said = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=True).stdout
        parts.append(f"{words}\n\n```\n$ python examples/{program}.py\n{said.rstrip()}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        sys.stdout.reconfigure(encoding="utf-8")
        sys.stdout.write(page())
    else:
        PAGE.write_text(page(), encoding="utf-8")
