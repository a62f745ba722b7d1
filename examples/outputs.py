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
`smollm2:135m` as it comes, greedy: 135 million weights in 4 bits. It is small, and what it says is often wrong.
Processors that round otherwise may make other texts of the same prompts.
"""
PROGRAMS = {
    "zero_shot": "## Zero-shot: the prompt alone\n\nThe prompt comes first; the model goes on where it ends.",
    "few_shot": "## Few-shot: solved cases, and one to solve\n\nThese are the answers; the cases are in few_shot/.",
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
