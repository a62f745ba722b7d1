"""What CMakeLists.txt builds, what isa.cpp chooses from, and what lies in src/native are one list."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NATIVE = ROOT / "src" / "native"
CMAKE = (ROOT / "CMakeLists.txt").read_text()


def test_every_instruction_set_is_built_declared_and_chosen_from() -> None:
    units = {path.stem.removeprefix("kernels_") for path in NATIVE.glob("kernels_*.cpp")}
    assert units == set(re.findall(r"add_kernels\((\w+)", CMAKE))
    assert units == set(re.findall(r"\* kernels_(\w+)\(\);", (NATIVE / "kernels.h").read_text())) - {"named"}
    chosen = re.findall(
        r'PRONK_HAS_(\w+)\)\n    \{"([\w-]+)", &Processor::\w+, kernels_(\w+)\}', (NATIVE / "isa.cpp").read_text()
    )
    assert units == {unit for _, _, unit in chosen}
    assert all(definition.lower() == unit == name.replace("-", "_") for definition, name, unit in chosen)


def test_every_native_test_is_run() -> None:
    names = re.search(r"foreach\(name ([\w ]+)\)", CMAKE)
    assert names
    assert set(names[1].split()) == {path.stem.removeprefix("test_") for path in NATIVE.glob("test_*.cpp")}


def test_two_builds_of_one_checkout_do_not_meet() -> None:
    """They shared a folder that pyproject.toml named: with none named there, each has a temporary one."""
    assert "build-dir" not in (ROOT / "pyproject.toml").read_text()


def test_one_build_runs_everywhere_and_sums_in_the_order_written() -> None:
    code = re.sub(r"#.*", "", CMAKE)
    assert "-ffp-contract=off" in code
    for forbidden in ("-ffast-math", "-Ofast", "-march=native", "-mtune=native", "-funsafe-math"):
        assert forbidden not in code
