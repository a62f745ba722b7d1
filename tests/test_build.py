"""What CMakeLists.txt builds, what processors are asked for, and what lies in src/native are one list."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NATIVE = ROOT / "src" / "native"
CMAKE = (ROOT / "CMakeLists.txt").read_text()


def test_every_instruction_set_is_one_that_a_processor_can_be_asked_for() -> None:
    """A name stands in CMakeLists.txt, which builds its kernels, and in processor.h, which says who can run them."""
    built = re.findall(r"^ *add_kernels\((\w+) (\w+) (\w+) (\w+)", CMAKE, re.MULTILINE)
    asked = re.sub(r"//.*", "", (NATIVE / "processor.h").read_text())
    assert {name for name, *_ in built} == set(re.findall(r"(\w+) = (?:true|false)", asked))
    assert {simd for *_, simd in built} == {path.stem for path in NATIVE.glob("simd_*.h")}
    assert built[-1] == ("portable", "portable", "portable", "simd_portable")  # best first
    own = {(name, simd) for name, like, _, simd in built if name == like}
    assert {(like, simd) for _, like, _, simd in built} == own  # whose kernels another one takes has all of them
    products = {(name, simd) for name, _, products, simd in built if name == products}
    assert {(products, simd) for *_, products, simd in built} == products  # likewise


# Where a format, or a type of keys and values, is asked for by name: the one kernel of each form of activations.
BY_NAME = re.compile(r"(?:case |[=!]= ?)((?:Format|KVType|Source|ActivationFormat)::\w+)")


def test_formats_are_told_apart_by_their_tables_alone() -> None:
    found = {
        path.name: set(BY_NAME.findall(path.read_text()))
        for path in NATIVE.iterdir()
        if BY_NAME.search(path.read_text()) and not path.name.startswith("test_")
    }
    activations = re.search(r"enum class ActivationFormat : int \{ ([\w, ]+) \}", (NATIVE / "formats.h").read_text())
    assert activations
    kinds = {f"ActivationFormat::{name}" for name in activations[1].split(", ")}
    assert found == {"formats.h": {"ActivationFormat::f32"}, "kernels.cpp": kinds}
    assert BY_NAME.findall("if (format == Format::q4) case KVType::int8:") == ["Format::q4", "KVType::int8"]


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
