"""CpuBackend: a Checkpoint packed into the native model, behind the engine's Backend protocol."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pronk import system
from pronk.checkpoint.tensors import Checkpoint, LazyTensor, Progress
from pronk.config import ModelConfig
from pronk.cpu_engine import ENGINE, weights
from pronk.cpu_engine.adapters import Adapters
from pronk.cpu_engine.kv import CpuKV, enough_memory
from pronk.cpu_engine.predictions import CpuPredictions
from pronk.cpu_engine.rope import Rope
from pronk.cpu_engine.slots import Slot, Wish, slots
from pronk.engine.backend import Activations, Backend, Inspection, KVStorage, check_predicts
from pronk.engine.batch import PASS_TOKENS, Batch, Int32
from pronk.engine.prefix_cache import BLOCK_SIZE, FIRST_BLOCKS
from pronk.errors import BadRequest, NotEnoughMemory, PronkError
from pronk.formats import FORMATS, KV_TYPES, SMALLEST
from pronk.formats.int8 import Outliers

if TYPE_CHECKING:
    from pronk import _native
    from pronk.checkpoint.adapter import Adapter

_EPS = 2.0**-23  # the last place of float32, in which embeddings and sums are kept whatever the weights are
_MOST_OUTLIERS = 1 << 22  # more than any token has numbers
_FEWER_TOKENS = "take fewer tokens at a time, through the KV cache"


class CpuBackend(Backend):
    engine, device, batch_invariant, shares_scales = ENGINE.name, "cpu", ENGINE.batch_invariant, False

    def __init__(
        self, model: _native.Model, config: ModelConfig, ctx_size: int, dtype: str, kv_dtype: str, token_bytes: int
    ) -> None:
        """`token_bytes`: what a pass takes for each of its tokens, about."""
        self.model, self.config, self.ctx_size = model, config, ctx_size
        self.dtype, self.kv_dtype = dtype, kv_dtype
        self._rope = Rope(model, config, ctx_size)
        self._noise = 0.0
        self._token_bytes, self._longest = token_bytes, PASS_TOKENS  # the model keeps the memory of its longest pass
        self._adapters = Adapters(model)

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint,
        *,
        quantize: Wish = "auto",
        int8_threshold: float | None = None,
        int8_outliers: int | None = None,
        kv_dtype: str | None = None,
        threads: int | None = None,
        ctx_size: int | None = None,
        isa: str | None = None,
        pack_cache: bool = False,
        progress: Progress | None = None,
    ) -> CpuBackend:
        """`quantize`: what weights are packed as; "auto" keeps what each tensor of the file has, and a mapping says it
        of tensors whose names begin with its keys. `int8_threshold` (None: what the checkpoint says, or 6.0) and
        `int8_outliers` (None: 6) are llm-int8's: see formats.int8.Outliers. `kv_dtype` None or "auto": f32 where most
        weights are f32 or f16, bf16 otherwise. `threads` None: one a physical core. `isa` None: the best one, or
        PRONK_ISA. `pack_cache`: a large model is kept packed (pack_cache.py); the checkpoint must be what its files
        hold. Raises BadFile, BadRequest, and PronkError where memory does not suffice.
        """
        if kv_dtype not in (None, "auto", *KV_TYPES):
            raise BadRequest(f"kv_dtype must be one of {', '.join(('auto', *KV_TYPES))}, not {kv_dtype!r}")
        for name, value, most in (("threads", threads, 1024), ("ctx_size", ctx_size, (1 << 31) - 1)):
            if value is not None and (type(value) is not int or not 1 <= value <= most):
                raise BadRequest(f"{name} must be a whole number from 1 to {most}, not {value!r}")
        native, found = load_native(), slots(checkpoint, quantize)
        dtype = weights.commonest(checkpoint, found)
        outliers = _outliers(checkpoint, found, int8_threshold, int8_outliers)
        if kv_dtype in (None, "auto"):
            kv_dtype = FORMATS[dtype].kv
        model = new_model(native, checkpoint.config, threads or native.default_threads(), isa, outliers)
        packed = weights.packed_bytes(native.packed_bytes, checkpoint, found)
        blocks = -(-ctx_size // BLOCK_SIZE) if ctx_size else FIRST_BLOCKS
        cache = native.KV(model, kv_dtype, 0).block_bytes * blocks
        way_out = _smaller(SMALLEST in (quantize, dtype), ctx_size is not None and cache > packed)
        system.check_memory(
            packed + cache + pass_bytes(checkpoint.config, found), f"{checkpoint.path}: running it", way_out
        )
        kept: Path | None = None
        try:
            if pack_cache:
                from pronk.cpu_engine import pack_cache as cache

                kept = cache.pack(model, checkpoint, found, packed, progress)
            else:
                weights.pack(model, checkpoint, found, progress)
        except MemoryError:
            raise NotEnoughMemory(f"{checkpoint.path}: memory ran out", way_out) from None
        ctx_size = ctx_size or checkpoint.config.max_position_embeddings
        backend = cls(model, checkpoint.config, ctx_size, dtype, str(kv_dtype), token_bytes(checkpoint.config, found))
        backend.newly_kept = kept
        return backend

    @property
    def nbytes(self) -> int:
        return self.model.nbytes + self._adapters.nbytes

    @property
    def attached(self) -> Collection[int]:  # type: ignore[override]
        return self._adapters.numbers

    def attach(self, adapter: Adapter) -> int:
        return self._adapters.attach(adapter)

    def detach(self, number: int) -> None:
        self._adapters.detach(number)

    def conditions(self) -> dict[str, Any]:
        return {"threads": self.model.threads, "isa": self.model.isa}

    def new_kv(self, num_blocks: int, block_size: int) -> CpuKV:
        if block_size != BLOCK_SIZE:
            raise ValueError(f"the CPU engine's blocks are of {BLOCK_SIZE} tokens, not {block_size}")
        native = load_native()
        with enough_memory(num_blocks, num_blocks * native.KV(self.model, self.kv_dtype, 0).block_bytes):
            return CpuKV(native.KV(self.model, self.kv_dtype, num_blocks))

    def perturbed(self) -> CpuBackend:
        """See pronk.engine.backend.Backend. Shares all weights: the noise is added as embeddings are looked up.

        It moves the logits as far as another order of the sums does (another instruction set, say), which where
        activations are rounded to fewer bits is much farther than in float32: some of them fall on the other side.
        """
        other = copy.copy(self)
        other._noise = _EPS
        return other

    def dequantized(self, checkpoint: Checkpoint) -> Checkpoint:
        tensors = dict(checkpoint.tensors)
        for name, tensor in checkpoint.tensors.items():
            if len(tensor.shape) == 2:
                tensors[name] = LazyTensor.made(name, tensor.shape, partial(self._unpack, name, tensor.shape))
        return replace(checkpoint, tensors=tensors, quantization=None)

    def forward(self, batch: Batch, kv: KVStorage | None) -> NDArray[np.float32]:
        check_predicts(self.config)
        self._check_memory(batch, kv, 4 * len(batch.logits_rows) * self.config.vocab_size)
        try:
            logits = self.model.forward(**self._arguments(batch, kv), logits_rows=batch.logits_rows)
        except (MemoryError, RuntimeError) as error:
            raise _failed(batch, error) from None
        self._longest = max(self._longest, len(batch.token_ids))
        return logits

    def hidden(self, batch: Batch, kv: KVStorage | None) -> NDArray[np.float32]:
        shape = len(batch.logits_rows), self.config.hidden_size
        self._check_memory(batch, kv, 4 * math.prod(shape))
        try:
            found = np.empty(shape, np.float32)
            self.model.hidden(**self._arguments(batch, kv), logits_rows=batch.logits_rows, out=found)
        except (MemoryError, RuntimeError) as error:
            raise _failed(batch, error) from None
        self._longest = max(self._longest, len(batch.token_ids))
        return found

    def predict(self, batch: Batch, kv: KVStorage | None) -> CpuPredictions:
        return CpuPredictions(self.forward(batch, kv), self.model)

    def activations(self, batch: Batch, kv: KVStorage | None) -> Activations:
        """See pronk.engine.backend.Backend. No logits are made. Raises PronkError where memory does not suffice."""
        config, tokens = self.config, len(batch.token_ids)
        q = config.num_attention_heads * config.head_dim
        widths = {"qkv": config.hidden_size, "o": q, "gate_up": config.hidden_size, "down": config.intermediate_size}
        need = 4 * tokens * (config.num_hidden_layers * sum(widths.values()) + config.hidden_size)
        system.check_memory(need, f"keeping the activations of {tokens} tokens", "take fewer at a time")
        self._check_memory(batch, kv, need)
        try:
            taps: dict[str, Any] = {
                name: np.empty((config.num_hidden_layers, tokens, k), np.float32) for name, k in widths.items()
            }
            head = np.empty((1, tokens, config.hidden_size), np.float32)
            self.model.activations(**self._arguments(batch, kv), **taps, head=head)
        except (MemoryError, RuntimeError) as error:
            raise _failed(batch, error) from None
        self._longest = max(self._longest, tokens)
        inputs = {(layer, name): of[layer] for layer in range(config.num_hidden_layers) for name, of in taps.items()}
        return {**inputs, (-1, "head"): head[0]}

    def inspect(
        self, batch: Batch, kv: KVStorage | None, layers: Sequence[int] = (), *, lens: bool = False
    ) -> Inspection:
        """See pronk.engine.backend.Backend. Raises PronkError where memory does not suffice."""
        check_predicts(self.config)
        config, (row,) = self.config, batch.logits_rows.tolist()
        depth, keys = config.num_hidden_layers + 1, int(batch.positions[row]) + 1
        scores_shape = (len(layers), config.num_attention_heads, keys)
        need = 4 * (depth * (config.hidden_size + lens * config.vocab_size) + 2 * math.prod(scores_shape))
        system.check_memory(need, "looking at a token", "look at fewer layers at a time")
        self._check_memory(batch, kv, need)
        try:
            hidden, scores = np.empty((depth, config.hidden_size), np.float32), np.empty(scores_shape, np.float32)
            logits = np.empty((depth, config.vocab_size), np.float32) if lens else None
            self.model.inspect(
                **self._arguments(batch, kv), logits_rows=batch.logits_rows, layers=np.array(layers, np.int32),
                hidden=hidden, scores=scores, lens=logits,
            )  # fmt: skip
        except (MemoryError, RuntimeError) as error:
            raise _failed(batch, error) from None
        self._longest = max(self._longest, len(batch.token_ids))
        with np.errstate(invalid="ignore"):  # of what is no number
            weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return Inspection(hidden, weights, logits)

    def _check_memory(self, batch: Batch, kv: KVStorage | None, result: int) -> None:
        """Raises NotEnoughMemory where a pass that gives `result` bytes does not fit.

        What a scheduler's passes take was counted when the model was loaded; longer ones are counted here.
        """
        tokens = len(batch.token_ids)
        if tokens > PASS_TOKENS:
            cache = 0 if kv else self._forgetful_kv(0).block_bytes * int((-(-batch.lengths // BLOCK_SIZE)).sum())
            need = result + cache + self._token_bytes * max(0, tokens - self._longest)
            system.check_memory(need, f"a pass over {tokens} tokens", _FEWER_TOKENS)

    def _arguments(self, batch: Batch, kv: KVStorage | None) -> dict[str, Any]:
        """Of a pass, as the native model takes them."""
        assert kv is None or isinstance(kv, CpuKV)
        self._rope.reach(batch.furthest)
        storage, blocks, ends = (kv.storage, batch.blocks, batch.block_offsets) if kv else self._forgetful(batch)
        return {
            "token_ids": batch.token_ids, "positions": batch.positions, "offsets": batch.offsets,
            "blocks": blocks, "block_offsets": ends, "kv": storage, "embedding_noise": self._noise,
            "adapters": self._adapters.of(batch, self.adapter),
        }  # fmt: skip

    def _forgetful(self, batch: Batch) -> tuple[_native.KV, Int32, Int32]:
        """Keys and values of one layer, which every layer overwrites, and tables for it."""
        if batch.positions[batch.offsets[:-1]].any():
            raise ValueError("without a KV cache every run must start at position 0")
        ends = np.cumsum([0, *(-(-batch.lengths // BLOCK_SIZE))], dtype=np.int32)
        blocks = np.arange(ends[-1], dtype=np.int32)
        return self._forgetful_kv(len(blocks)), blocks, ends

    def _forgetful_kv(self, num_blocks: int) -> _native.KV:
        storage: _native.KV = load_native().KV(self.model, self.kv_dtype, num_blocks, remembers=False)
        return storage

    def _unpack(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        role, layer, _ = weights.place(name)
        out = np.empty(shape, np.float32)
        try:
            self.model.unpack(role, layer, 0, out)
        except RuntimeError as error:
            raise PronkError(f"{error}") from None
        return out


def _failed(batch: Batch, error: MemoryError | RuntimeError) -> PronkError:
    what = f"memory ran out in a pass over {len(batch.token_ids)} tokens"
    # Else it was called where waiting for the pass under way would never end.
    return NotEnoughMemory(what, _FEWER_TOKENS) if isinstance(error, MemoryError) else PronkError(f"{error}")


def load_native() -> ModuleType:
    """pronk._native. Raises PronkError where it cannot be imported."""
    try:
        from pronk import _native
    except ImportError as error:
        raise PronkError(
            f"pronk's CPU engine cannot be imported ({error}); reinstall pronk, or run on torch: engine='torch' "
            "(--engine torch)"
        ) from None
    return _native


def new_model(
    native: ModuleType, config: ModelConfig, threads: int, isa: str | None = None, outliers: Outliers | None = None
) -> _native.Model:
    outliers = outliers or Outliers()
    try:
        model: _native.Model = native.Model(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            threads=threads,
            isa=isa,
            int8_threshold=outliers.threshold,
            int8_outliers=min(outliers.least, _MOST_OUTLIERS),
        )
    except ValueError as error:  # sizes no model has, and a PRONK_ISA that this processor has not
        raise BadRequest(f"{error}") from None
    except RuntimeError as error:
        raise PronkError(f"cannot start {threads} threads ({error}); give fewer with threads= (--threads)") from None
    return model


def _outliers(checkpoint: Checkpoint, slots: list[Slot], threshold: float | None, least: int | None) -> Outliers:
    """What llm-int8 computes apart. Raises BadRequest where something is said of it and nothing packed so."""
    for name, value in (("int8_threshold", threshold), ("int8_outliers", least)):
        if value is not None and not any(slot.format.outliers for slot in slots):
            raise BadRequest(
                f"{name}={value!r} is for llm-int8, and nothing is packed so; leave it out, or ask for that"
            )
    usual = Outliers()
    if threshold is None:
        threshold = usual.threshold if checkpoint.int8_threshold is None else checkpoint.int8_threshold
    return Outliers(threshold, usual.least if least is None else least)


def _smaller(is_smallest: bool, cache_is_most: bool) -> str:
    if cache_is_most:
        return "give a smaller ctx_size (--ctx-size), or smaller keys and values: kv_dtype='q4' (--kv-dtype q4)"
    if is_smallest:
        return "choose a smaller model"
    return f"choose a smaller model, or pack it smaller with quantize={SMALLEST!r} (--quantize {SMALLEST})"


def pass_bytes(config: ModelConfig, slots: list[Slot]) -> int:
    """What a scheduler's forward pass takes besides, about."""
    return PASS_TOKENS * token_bytes(config, slots) + 4 * config.vocab_size


def token_bytes(config: ModelConfig, slots: list[Slot]) -> int:
    """What a forward pass takes for each of its tokens, about."""
    q, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    widest = max(config.hidden_size, config.intermediate_size, q)
    outliers = 2 * widest if any(slot.format.outliers for slot in slots) else 0  # room for all to be some
    return 4 * (outliers + config.hidden_size + 2 * q + 2 * keys + config.intermediate_size + widest)
