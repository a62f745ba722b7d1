"""The formats of weights, and the types of keys and values: a record each, which all that packs, writes, trains or
measures reads. Nothing else says what q4 is.

To add a format: a record here, and its name in `Quantize`; what its codes mean, in formats/quantize.py; its kernel; its
tests. docs/architecture.md lists the files.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Quantize = Literal[
    "auto", "f32", "f16", "bf16", "int8", "llm-int8", "q8", "q4", "absmax", "absmax-row", "zeropoint"
]  # fmt: skip
KVName = Literal["auto", "f32", "f16", "bf16", "int8", "q4"]
Activations = Literal["f32", "bf16", "int8 a token", "int8 a group", "int8 a pass"]

GROUP = 32  # weights along a row that share a scale


class Coding(NamedTuple):
    """Whole numbers q that stand for weights: scale * (q - origin) + minimum."""

    name: str  # of what makes them of floats; formats whose codes have one name hold the same weights
    group: int | None  # weights of a row with a scale of their own, in float16; None: all of a row, or more, in float32
    minimum: bool = False
    origin: int = 0
    block: tuple[int, int] | None = None  # weights of a row, and their bytes, where scales are not one float16 a group


class Format(NamedTuple):
    name: str
    bits: int  # of a number or a code, scales not counted
    codes: Coding | None  # None: floats
    stored: tuple[str, ...]  # types of files whose numbers it has exactly; the first is what it is written as
    activations: Activations  # what these are rounded to before they are multiplied; in groups by the CPU engine alone
    engines: tuple[str, ...]  # that compute with it
    files: tuple[str, ...] = ()  # formats of files that it is written in
    nearly: tuple[str, ...] = ()  # stored types that it comes nearest to: their codes are kept, their scales rounded
    trains: bool = False  # whether LoRA is trained beside it
    outer: str | None = None  # what embeddings and lm_head get where it is not asked for by their names
    kind_of: str | None = None  # the format that this is another kind of, for what is stored so: not asked for by name
    turned: bool = False  # whether rows of weights and of activations are, before they are rounded: see formats.turn
    outliers: bool = False  # whether large activations are computed apart, as LLM.int8() does
    made: bool = True  # whether anything is rounded to it; or it only keeps what files have in its very blocks

    def holds(self, stored: str, *, nearly: bool = False) -> bool:
        """Whether what is stored so is kept as it is: packed, written and trained beside without being rounded anew."""
        return stored in self.stored or (nearly and stored in self.nearly)

    def nbytes(self, rows: int, columns: int) -> int:
        """Of a matrix, with its scales."""
        if self.codes is None:
            return rows * columns * self.bits // 8
        if self.codes.group is None:
            return rows * (columns * self.bits // 8 + 4)
        if self.codes.block:
            weights, nbytes = self.codes.block
            return rows * -(-columns // weights) * nbytes
        return rows * -(-columns // self.codes.group) * (self.codes.group * self.bits // 8 + 2 + 2 * self.codes.minimum)

    @property
    def shares_scales(self) -> bool:
        """Whether the tokens of a pass do, so that a token's result depends on the others."""
        return self.activations == "int8 a pass"

    @property
    def kv(self) -> str:
        """What "auto" makes keys and values: the type that adds no rounding of another order."""
        return "f32" if self.activations == "f32" else "bf16"


_BOTH = ("cpu", "torch")
_TURNED, _ROW, _Q8 = Coding("turned int8", None), Coding("int8", None), Coding("q8", GROUP)
_Q4, _Q4_0 = Coding("q4", GROUP, minimum=True), Coding("q4_0", GROUP, origin=8)


def _kept(stored: str, bits: int, group: int, nbytes: int = 0, *, minimum: bool = False) -> Format:
    """A block type of GGUF that runs as it is. `nbytes`: of 256 weights in memory, where scales are whole numbers times
    one float16 for all of them."""
    origin = 0 if minimum else 1 << (bits - 1)
    coding = Coding(stored.lower(), group, minimum, origin, (256, nbytes) if nbytes else None)
    return Format(stored.lower(), bits, coding, (stored,), "int8 a group", ("cpu",), made=False)


# `outer`: four bits cost more in embeddings and lm_head than anywhere else; LLM.int8() leaves both in 16 bits; and of
# what is left once int8's rows are turned, an eighth comes of a scale a row in these two.
FORMATS = {
    format.name: format
    for format in (
        Format("f32", 32, None, ("F32",), "f32", _BOTH, ("safetensors", "llama2c", "gguf"), trains=True),
        Format("f16", 16, None, ("F16",), "f32", _BOTH, ("safetensors", "gguf")),
        Format("bf16", 16, None, ("BF16",), "bf16", _BOTH, ("safetensors", "gguf")),
        Format("q8_0", 8, Coding("q8_0", GROUP), ("Q8_0",), "int8 a group", (), ("gguf",)),  # q8, rounded as ggml does
        Format(
            "int8", 8, _TURNED, ("TURNED_INT8",), "int8 a token", _BOTH, ("safetensors", "llama2c"), trains=True,
            outer="q8", turned=True,
        ),
        # What files have whose makers did not turn it.
        Format("int8_plain", 8, _ROW, ("INT8", "LLM_INT8"), "int8 a token", _BOTH, kind_of="int8"),
        Format(
            "llm-int8", 8, _ROW, ("LLM_INT8", "INT8"), "int8 a token", _BOTH, ("safetensors",), trains=True,
            outer="q8", outliers=True,
        ),
        Format("q8", 8, _Q8, ("Q8_0",), "int8 a group", _BOTH, ("gguf",), trains=True),
        Format(
            "q4", 4, _Q4, ("Q4_1", "Q4_0"), "int8 a group", _BOTH, ("gguf",), ("Q4_K",), trains=True, outer="q8"
        ),
        Format("q4_0", 4, _Q4_0, ("Q4_0",), "int8 a group", _BOTH, kind_of="q4"),
        _kept("Q6_K", 6, 16, 210),
        _kept("Q5_K", 5, GROUP, 180, minimum=True),
        _kept("Q4_K", 4, GROUP, 148, minimum=True),
        _kept("Q3_K", 3, 16, 114),
        _kept("Q2_K", 2, 16, 84, minimum=True),
        _kept("Q5_0", 5, GROUP),
        _kept("Q5_1", 5, GROUP, minimum=True),
        _kept("IQ4_NL", 4, GROUP),
        _kept("IQ4_XS", 4, GROUP, 138),
        Format("absmax", 8, Coding("absmax", None), (), "int8 a pass", ("torch",)),
        Format("absmax-row", 8, Coding("absmax", None), (), "int8 a token", ("torch",)),
        Format("zeropoint", 8, Coding("zeropoint", None), (), "int8 a pass", ("torch",)),
    )
}  # fmt: skip
# What a stored type that no format keeps is packed in, and what holds two types that nothing else is rounded to.
FALLBACK = FORMATS["q8"]


class KVType(NamedTuple):
    name: str
    nbytes: float  # a number, with what its group shares
    scale: int = 0  # bytes beside the key, or the value, of a token and head
    turned: bool = False  # whether each head is, before it is rounded: see formats.turn


KV_TYPES = {
    kv.name: kv
    for kv in (
        KVType("f32", 4),
        KVType("f16", 2),
        KVType("bf16", 2),
        KVType("int8", 1, 4, turned=True),
        KVType("q4", 1 / 2 + 2 / 16, 4, turned=True),
    )
}


def names(*, engine: str | None = None, file: str | None = None) -> tuple[str, ...]:
    """Of the formats that may be asked for: those that an engine computes with, and those that a file is written in."""
    return tuple(
        name
        for name, format in FORMATS.items()
        if format.made and not format.kind_of and engine in (None, *format.engines) and file in (None, *format.files)
    )


FLOATS = tuple(name for name, format in FORMATS.items() if format.codes is None)
TRAINED = tuple(name for name, format in FORMATS.items() if format.trains)
WITH_OUTLIERS = tuple(name for name, format in FORMATS.items() if format.outliers)
SMALLEST = min(names(engine="cpu"), key=lambda name: FORMATS[name].nbytes(1, GROUP))


def kept(stored: str) -> Format:
    """What keeps a stored type: exactly, most nearly, or in FALLBACK's bits."""
    ready = [FORMATS[name] for name in FORMATS if "cpu" in FORMATS[name].engines]
    exact = (format for format in ready if format.stored[:1] == (stored,))
    return next(exact, None) or next((format for format in ready if stored in format.nearly), FALLBACK)


def packed(asked: str, stored: str, *, outer: bool = False) -> Format:
    """What a matrix of a stored type is made where `asked`, "auto" or a format's name, is asked for. `outer`: it is
    the embedding or lm_head, and not asked for by its name."""
    if asked == "auto":
        return kept(stored)
    format = FORMATS[asked]
    kinds = (*(kind for kind in FORMATS.values() if kind.kind_of == asked), format)
    if own := next((kind for kind in kinds if kind.holds(stored, nearly=True)), None):
        return own
    return FORMATS[format.outer] if outer and format.outer else format


def wider(a: Format, b: Format) -> Format:
    """What holds both; of two types of as many bits neither holds the other."""
    if a.name != b.name:
        a, b = (format if format.made else FALLBACK for format in (a, b))
    if a.name == b.name or (b.name == a.kind_of and set(a.stored) <= set(b.stored)):
        return b
    if a.name == b.kind_of and set(b.stored) <= set(a.stored):
        return a
    if a.bits != b.bits:
        return max(a, b, key=lambda format: format.bits)
    if a.codes and b.codes and a.codes.name == b.codes.name:
        return a if a.outliers else b  # which holds the same weights
    return FORMATS["f32"]
