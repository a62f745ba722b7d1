"""The CPU engine in C++ (src/native). Every argument is checked: wrong sizes, names and numbers raise ValueError, wrong
types of arrays TypeError. Arrays are C-contiguous. `isa`: one of `isas()`; None is the one that `isa()` names."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_Floats = NDArray[np.float32]
_Ints = NDArray[np.int32]
_Bytes = NDArray[np.uint8]
_Asked = tuple[float, int, float, float, float, float, float, _Ints, _Floats, bool, int]
_Row = tuple[int, float, _Asked, _Ints | None, int, NDArray[np.bool_] | None]

def isas() -> list[str]:
    """Instruction sets that this processor can run, best first."""

def isa() -> str:
    """The one in use: PRONK_ISA, or the best."""

class Format:
    """What the kernels know of a weight format."""

    @property
    def name(self) -> str: ...
    @property
    def activations(self) -> str:
        """What they are rounded to beside it."""

    @property
    def holds(self) -> list[str]:
        """The sources whose codes it keeps as they are."""

    @property
    def longest_row(self) -> int: ...

def formats() -> list[Format]: ...
def sources() -> list[str]:
    """Types of rows that can be packed, as checkpoints name them."""

def filters() -> list[str]:
    """Of sampling, in the order in which they are run."""

def kv_types() -> list[str]: ...
def kv_block() -> int:
    """Tokens in a block of keys and values."""

def default_threads() -> int:
    """One a physical core of the process's affinity mask, within its cgroup's quota."""

def checksum(memory: _Bytes, threads: int) -> int:
    """XXH64 of the XXH64 of each MiB."""

def packed_bytes(format: str, rows: int, cols: int, pairs: bool = False) -> int: ...

class Model:
    def __init__(
        self,
        *,
        vocab_size: int,
        hidden_size: int,
        intermediate_size: int,
        num_hidden_layers: int,
        num_attention_heads: int,
        num_key_value_heads: int,
        head_dim: int,
        rms_norm_eps: float,
        threads: int,
        isa: str | None = None,
        int8_threshold: float = 6.0,
        int8_outliers: int = 6,
    ) -> None:
        """`int8_threshold`, `int8_outliers`: see pronk.formats.int8.Outliers."""

    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def lend(self, memory: _Bytes) -> None:
        """Matrices allocated from now on lie in `memory`, [bytes] from a line of 256 on, one behind the other."""

    def mount(self, memory: _Bytes) -> None:
        """As lend, of memory that holds what they are, and is never written to."""

    def allocate(self, role: str, layer: int, format: str) -> None:
        """q_proj, k_proj, v_proj, o_proj, gate_up_proj, down_proj of a layer; embed_tokens, lm_head of none (-1)."""

    def tie(self) -> None:
        """lm_head is embed_tokens."""

    def pack(self, role: str, layer: int, raw: _Bytes, source: str, first: int = 0) -> bool:
        """Rows as a file holds them, [rows, bytes], into rows `first` and on; False where a number is not finite, or
        too large for the format. gate_proj and up_proj are the parts of gate_up_proj."""

    def unpack(self, role: str, layer: int, first: int, out: _Floats) -> None: ...
    def set_bias(self, role: str, layer: int, values: _Floats) -> None: ...
    def set_norm(self, name: str, layer: int, weight: _Floats) -> None:
        """input_layernorm or post_attention_layernorm of a layer; norm of none (-1)."""

    def attach(self, modules: Sequence[tuple[str, int, _Floats, _Floats, float]]) -> tuple[int, int]:
        """An adapter: role, layer, A [rank, K], B [N, rank] and scale of each module. Its place, and its bytes."""

    def detach(self, adapter: int) -> None: ...
    def set_rope(self, cos: _Floats, sin: _Floats) -> None:
        """Of every position from 0 on, [positions, D/2]."""

    def forward(
        self,
        token_ids: _Ints,
        positions: _Ints,
        offsets: _Ints,
        blocks: _Ints,
        block_offsets: _Ints,
        logits_rows: _Ints,
        kv: KV,
        embedding_noise: float = 0.0,
        adapters: _Ints | None = None,
    ) -> _Floats:
        """Logits [R, V] of a pronk.engine.batch.Batch, with block tables one after the other, and the place of each
        run's adapter, -1 for none.

        Leaves threads at the pass that most likely comes next, until it or another one is asked for, or its keys and
        values are quiesced, grown, copied or let go of: see pronk.engine.backend. Raises what a signal handler raises.
        """

    def draw(self, logits: _Floats, rows: Sequence[_Row]) -> list[tuple[int, float, int, list[int]]]:
        """A token for each of `rows`, what pronk.engine.sampling draws of logits [R, V].

        A row: which, its coin, what is asked (SamplingParams.asked), prompt and generated tokens where penalties ask
        for them and how many of them are the prompt's, and which tokens may be drawn, in words of 32 bits, the lowest
        first. Gives the token, -1 where the logits are not numbers; and where log-probabilities are asked for the
        largest logit, the weight of all tokens and the likeliest ones.
        """

    def activations(
        self,
        token_ids: _Ints,
        positions: _Ints,
        offsets: _Ints,
        blocks: _Ints,
        block_offsets: _Ints,
        kv: KV,
        qkv: _Floats,
        o: _Floats,
        gate_up: _Floats,
        down: _Floats,
        head: _Floats,
        embedding_noise: float = 0.0,
        adapters: _Ints | None = None,
    ) -> None:
        """The same pass over all rows, without logits: what is multiplied, [L, T, K]; head [1, T, C]."""

    def hidden(
        self,
        token_ids: _Ints,
        positions: _Ints,
        offsets: _Ints,
        blocks: _Ints,
        block_offsets: _Ints,
        logits_rows: _Ints,
        kv: KV,
        out: _Floats,
        embedding_noise: float = 0.0,
        adapters: _Ints | None = None,
    ) -> None:
        """The same pass, without logits: what the head would be given of the rows that want them, out [R, C]."""

    def inspect(
        self,
        token_ids: _Ints,
        positions: _Ints,
        offsets: _Ints,
        blocks: _Ints,
        block_offsets: _Ints,
        logits_rows: _Ints,
        kv: KV,
        layers: _Ints,
        hidden: _Floats,
        scores: _Floats,
        lens: _Floats | None = None,
        embedding_noise: float = 0.0,
        adapters: _Ints | None = None,
    ) -> None:
        """The same pass, without logits, and what a probe shows of its one row: see Backend.inspect."""

class KV:
    def __init__(self, model: Model, type: str, num_blocks: int, remembers: bool = True) -> None:
        """Blocks of kv_block() tokens. What remembers nothing serves passes from position 0 on, and is of one layer."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def written_ahead(self) -> bool:
        """Whether a pass that writes here was begun ahead, and was neither asked for nor given up."""

    def reserve(self, num_blocks: int) -> int:
        """Set aside addresses for so many blocks, or as many as there are addresses for: up to there resize() moves
        nothing. Gives how many."""

    def resize(self, num_blocks: int) -> None: ...
    def copy(self, pairs: _Ints) -> None: ...
    def quiesce(self) -> None:
        """Has a pass given up that was begun ahead."""

def round_rows(
    weights: _Floats,
    upper: _Floats | None,
    block: int,
    group: int,
    low: int,
    high: int,
    minimum: bool,
    scales: tuple[int, int] | None,
    curved: bool,
    codes: NDArray[np.int8],
    d: _Floats,
    dmin: _Floats,
    n: NDArray[np.int16],
    m: NDArray[np.int16],
    isa: str | None = None,
) -> None:
    """calibrate/gptq.py says what of: finite `weights` [N, K] and `upper` [K, K] go in; codes [N, K], d and dmin
    [N, K / block], n and m [N, K / group] come out."""

# Single kernels, for tests.

class Matrix:
    def __init__(self, format: str, rows: int, cols: int, pairs: bool = False, threads: int = 1) -> None: ...
    @property
    def nbytes(self) -> int: ...
    def pack(self, raw: _Bytes, source: str, first: int = 0, part: str = "whole") -> bool: ...
    def unpack(self, out: _Floats, first: int = 0, part: str = "whole") -> None: ...

def matmul(
    matrix: Matrix,
    x: _Floats,
    out: _Floats,
    add: bool = False,
    isa: str | None = None,
    int8_threshold: float = 6.0,
    int8_outliers: int = 6,
) -> None: ...
def rmsnorm(x: _Floats, weight: _Floats, eps: float, out: _Floats, isa: str | None = None) -> None: ...
def rope(x: _Floats, cos: _Floats, sin: _Floats, isa: str | None = None) -> None: ...
def attention(
    q: _Floats,
    keys: _Floats,
    values: _Floats,
    limits: _Ints,
    blocks: _Ints,
    type: str,
    at_once: int,
    out: _Floats,
    isa: str | None = None,
) -> None:
    """Rows of `q`, the i-th of which sees `limits[i]` keys; `at_once` of them share a call, and 0 is as many as can."""
