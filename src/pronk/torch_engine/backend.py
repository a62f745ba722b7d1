"""TorchBackend: a Checkpoint made into a Llama module, behind the engine's Backend protocol."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pronk.checkpoint.adapter import Adapter
from pronk.checkpoint.readers import int8_rows
from pronk.checkpoint.tensor_stream import TensorStream
from pronk.checkpoint.tensors import PLAIN_DTYPES, Checkpoint, LazyTensor, Progress, check_finite
from pronk.engine.backend import Activations, Backend, Inspection, KVStorage, check_predicts
from pronk.engine.batch import Batch
from pronk.errors import BadRequest
from pronk.formats import FORMATS, packed
from pronk.formats.int8 import LONGEST_ROW, SCHEMES, Outliers, Scheme
from pronk.torch_engine import CODED, ENGINE, device_memory, gpu, grouped, inspection
from pronk.torch_engine.activations import overheard
from pronk.torch_engine.adapters import Adapters
from pronk.torch_engine.batch import TorchBatch
from pronk.torch_engine.codes_linear import CodesLinear
from pronk.torch_engine.codes_linear import linear as linear_of_codes
from pronk.torch_engine.kv import TorchKV
from pronk.torch_engine.model import AttentionMode, Llama
from pronk.torch_engine.packed import PackedLinear, pack
from pronk.torch_engine.predictions import TorchPredictions
from pronk.torch_engine.quantized import Int8Codes, Int8Linear, weight_codes

if TYPE_CHECKING:
    from pronk.torch_engine.gpu.graphs import Found, Graphs
    from pronk.torch_engine.gpu.step import Step

_CODED = (Int8Linear, CodesLinear)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


class TorchBackend(Backend):
    engine = ENGINE.name

    def __init__(
        self, model: Llama, ctx_size: int | None = None, *, step: Step | None = None, batch_invariant: bool = False
    ) -> None:
        """`step`: of the same matrices, where they are joined already. Raises BadRequest where passes cannot be made
        batch-invariant."""
        self.model, self.config = model, model.config
        self.ctx_size = ctx_size or model.config.max_position_embeddings
        weight = model.model.embed_tokens.weight
        self.device, self._float_type = str(weight.device), weight.dtype
        self.kv_dtype = next(name for name, dtype in DTYPES.items() if dtype is weight.dtype)
        layers = model.model.modules()
        schemes = {m.scheme if isinstance(m, Int8Linear) else m.format for m in layers if isinstance(m, _CODED)}
        # As in "llm-int8+bf16": of most weights, and of activations, keys and values, embedding and head.
        self.dtype = "+".join([*schemes, self.kv_dtype])
        self.shares_scales = model.every_row = any(FORMATS[scheme].shares_scales for scheme in schemes)
        self._adapters = Adapters(model, weight.dtype)
        self._graphs = _graphs(model, weight.device, step, batch_invariant)
        self.batch_invariant = self._graphs is not None and self._graphs.step.invariant
        if batch_invariant and not self.batch_invariant:
            raise BadRequest(
                "batch_invariant takes a GPU and weights that are floats (quantize=f32, bf16 or f16), with "
                "attn='flash'; on a CPU, engine='cpu' is so without being asked"
            )

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint,
        *,
        quantize: str | None = None,
        int8_threshold: float | None = None,
        int8_outliers: int | None = None,
        device: str | None = None,
        compute_dtype: str | None = None,
        attn: AttentionMode = "flash",
        batch_invariant: bool = False,
        threads: int | None = None,
        ctx_size: int | None = None,
        progress: Progress | None = None,
    ) -> TorchBackend:
        """`device` None: CUDA where there is one.

        `quantize`: a type that all weights are and are computed in, stored codes included (None: float32 on a CPU, the
        stored 16-bit type on a GPU); or a scheme of formats.int8 for every Linear but lm_head, or codes in groups for
        every Linear, and `compute_dtype` for all else (None: that same type). `int8_threshold` None: what the
        checkpoint says, or 6.0; both are llm-int8's (pronk.formats.int8.Outliers). `batch_invariant`: on a GPU, of
        floats alone. `threads` is torch's, and holds for the whole process.
        """
        _check(attn, threads, ctx_size)
        scheme, dtype = _scheme(quantize, int8_threshold, int8_outliers, compute_dtype)
        outliers = _outliers(checkpoint, int8_threshold, int8_outliers)
        if threads is not None:
            torch.set_num_threads(threads)
        where = pick_device(device)
        kind = DTYPES[dtype or default_dtype(checkpoint, where)]
        linear = linear_of_codes(checkpoint, quantize, where, kind) if quantize and grouped(quantize) else None
        model = load_model(checkpoint, where, kind, attn, ctx_size, progress, scheme, outliers, linear)
        model.eval().requires_grad_(False)
        pack(model)
        return cls(model, ctx_size, batch_invariant=batch_invariant)

    @property
    def nbytes(self) -> int:
        """Of parameters and buffers, each once, and of what packed layers keep in their stead."""
        weights = sum(t.numel() * t.element_size() for t in {id(t): t for t in _tensors(self.model)}.values())
        return weights + self._adapters.nbytes

    @property
    def attached(self) -> Collection[int]:  # type: ignore[override]
        return self._adapters.numbers

    def attach(self, adapter: Adapter) -> int:
        if self.batch_invariant:
            raise BadRequest(f"{adapter.path}: batch_invariant takes no adapter beside the weights; merge it")
        return self._adapters.attach(adapter)

    def detach(self, number: int) -> None:
        self._adapters.detach(number)

    @property
    def device_memory(self) -> device_memory.CudaMemory | None:
        return device_memory.of(self.device)

    def conditions(self) -> dict[str, Any]:
        return {"threads": torch.get_num_threads(), "isa": torch.backends.cpu.get_cpu_capability()}

    def new_kv(self, num_blocks: int, block_size: int) -> TorchKV:
        return TorchKV(self.config, num_blocks, block_size, self._float_type, torch.device(self.device))

    def perturbed(self) -> TorchBackend:
        """See pronk.engine.backend.Backend. Shares every weight but the embedding."""
        model = copy.copy(self.model)
        model._modules = dict(model._modules)
        decoder = model._modules["model"] = copy.copy(model.model)
        decoder._modules = dict(decoder._modules)
        embedding = decoder._modules["embed_tokens"] = copy.copy(decoder.embed_tokens)
        weight = embedding.weight.detach()
        generator = torch.Generator().manual_seed(0)
        signs = torch.randint(2, weight.shape, generator=generator, dtype=torch.int8).to(weight) * 2 - 1
        nudged = weight * (1 + signs * torch.finfo(weight.dtype).eps)
        embedding._parameters = {"weight": torch.nn.Parameter(nudged, requires_grad=False)}
        other = TorchBackend(model, self.ctx_size, step=self._graphs.step if self._graphs else None)
        other.adapter, other._adapters = self.adapter, self._adapters  # whose hooks the layers have
        return other

    def dequantized(self, checkpoint: Checkpoint) -> Checkpoint:
        modules = dict(self.model.named_modules())

        def made(name: str, tensor: LazyTensor) -> LazyTensor:
            module = modules.get(name.removesuffix(".weight"))

            def read() -> NDArray[np.float32]:
                if isinstance(module, torch.nn.Embedding):  # which a head in codes rounds, too
                    return module.weight.float().cpu().numpy()
                if isinstance(module, _CODED):
                    return module.dequantized().cpu().numpy()
                return to_torch(tensor.read(), torch.device("cpu"), self._float_type).float().numpy()

            return LazyTensor.made(name, tensor.shape, read)

        tensors = {name: made(name, tensor) for name, tensor in checkpoint.tensors.items()}
        return replace(checkpoint, tensors=tensors, quantization=None)

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KVStorage | None) -> NDArray[np.float32]:
        return self._logits(batch, kv).float().cpu().numpy()

    @torch.inference_mode()
    def hidden(self, batch: Batch, kv: KVStorage | None) -> NDArray[np.float32]:
        where = self._on_device(batch, kv)
        with self._adapters.beside(batch, self.adapter):
            return self.model.hidden(where, kv).float().cpu().numpy()  # type: ignore[arg-type]

    @torch.inference_mode()
    def predict(self, batch: Batch, kv: KVStorage | None) -> TorchPredictions:
        if (found := self._by_graphs(batch, kv)) is not None:
            return TorchPredictions(*found)
        return TorchPredictions(self._logits(batch, kv))

    @torch.inference_mode()
    def activations(self, batch: Batch, kv: KVStorage | None) -> Activations:
        check_predicts(self.config)
        every = replace(batch, logits_rows=np.arange(len(batch.token_ids), dtype=np.int32))  # the last layer's, too
        with overheard(self.model) as seen:
            self._by_modules(every, kv)
        return seen

    @torch.inference_mode()
    def inspect(
        self, batch: Batch, kv: KVStorage | None, layers: Sequence[int] = (), *, lens: bool = False
    ) -> Inspection:
        check_predicts(self.config)
        where = self._on_device(batch, kv)
        with self._adapters.beside(batch, self.adapter):
            return inspection.of(self.model, where, kv, layers, lens)  # type: ignore[arg-type]

    def _logits(self, batch: Batch, kv: KVStorage | None) -> Tensor:
        """[R, V] on the device, in the type that they are computed in."""
        found = self._by_graphs(batch, kv)
        return self._by_modules(batch, kv) if found is None else found.logits

    def _by_graphs(self, batch: Batch, kv: KVStorage | None) -> Found | None:
        """None where there are none, or the pass is not for them."""
        check_predicts(self.config)
        if self._graphs is None or batch.adapters_of_runs(self.adapter) is not None:
            return None
        assert kv is None or isinstance(kv, TorchKV)
        return self._graphs(batch, kv)

    def _by_modules(self, batch: Batch, kv: KVStorage | None) -> Tensor:
        check_predicts(self.config)
        where = self._on_device(batch, kv)
        with self._adapters.beside(batch, self.adapter):
            logits: Tensor = self.model(where, kv)
        return logits

    def _on_device(self, batch: Batch, kv: KVStorage | None) -> TorchBatch:
        """For the plain module, which may write into a cache behind the graphs' back."""
        assert kv is None or isinstance(kv, TorchKV)
        if self._graphs is not None:
            self._graphs.forget()
        return TorchBatch.of(batch, torch.device(self.device), kv.block_size if kv else None)


def _tensors(model: Llama) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    for module in model.modules():
        if isinstance(module, PackedLinear):
            yield from (tensor for tensor in (module.weight, module.bias) if tensor is not None)
        if isinstance(module, CodesLinear) and module.joined:
            yield from module.joined[0].tensors


def _graphs(model: Llama, device: torch.device, step: Step | None, invariant: bool) -> Graphs | None:
    """Where there are fused kernels for the device and for all matrices; attention that is to be read is not fused."""
    if not gpu.available(device):
        return None
    from pronk.torch_engine.gpu.graphs import Graphs
    from pronk.torch_engine.gpu.step import Step, can_step

    attention = model.model.layers[0].self_attn
    if attention.mode == "math" or not (step or can_step(model, invariant=invariant)):
        return None
    return Graphs(step or Step(model, invariant=invariant), model)


def _check(attn: str, threads: int | None, ctx_size: int | None) -> None:
    if attn not in get_args(AttentionMode):
        raise BadRequest(f"attn must be {' or '.join(get_args(AttentionMode))}, not {attn!r}")
    for name, value, most in (("threads", threads, 1024), ("ctx_size", ctx_size, (1 << 31) - 1)):
        if value is not None and (type(value) is not int or not 1 <= value <= most):
            raise BadRequest(f"{name} must be a whole number from 1 to {most}, not {value!r}")


def _scheme(
    quantize: str | None, threshold: float | None, least: int | None, compute_dtype: str | None
) -> tuple[Scheme | None, str | None]:
    """Of Linears, if they have one, and the type of all else; None: the default."""
    if quantize is not None and quantize not in ENGINE.formats:
        raise BadRequest(f"quantize must be one of {', '.join(ENGINE.formats)} on the torch engine, not {quantize!r}")
    for name, value in (("int8_threshold", threshold), ("int8_outliers", least)):
        if value is not None and not (quantize and FORMATS[quantize].outliers):
            raise BadRequest(f"{name}={value!r} is for quantize='llm-int8'; leave it out, or ask for that")
    if compute_dtype is not None and compute_dtype not in DTYPES:
        raise BadRequest(f"compute_dtype must be one of {', '.join(DTYPES)}, not {compute_dtype!r}")
    if quantize in CODED:
        return next((scheme for scheme in SCHEMES if scheme == quantize), None), compute_dtype
    if compute_dtype not in (None, quantize):
        given = "floats" if quantize is None else f"quantize={quantize!r}"
        raise BadRequest(
            f"compute_dtype={compute_dtype!r} goes with weights in 8 or 4 bits, and not with {given}; leave it out, or "
            f"take quantize={compute_dtype!r}"
        )
    return None, quantize


def _outliers(checkpoint: Checkpoint, threshold: float | None, least: int | None) -> Outliers:
    threshold = checkpoint.int8_threshold if threshold is None else threshold
    given = {"threshold": threshold, "least": least}
    return Outliers(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


def pick_device(name: str | None) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise BadRequest(f"device {name!r} is unknown; cpu and cuda (or cuda:1, ...) are known") from None
    if device.type not in ("cpu", "cuda"):
        raise BadRequest(f"device {name!r} is not supported; cpu and cuda are")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BadRequest(f"device {name!r} was asked for, but torch sees {torch.cuda.device_count()} CUDA devices")
    return device


def default_dtype(checkpoint: Checkpoint, device: torch.device) -> str:
    if device.type == "cpu":
        return "f32"
    return "f16" if any(t.dtype == "F16" for t in checkpoint.tensors.values()) else "bf16"


def load_module(checkpoint: Checkpoint, ctx_size: int | None = None) -> Llama:
    """The plain module in float32 on the CPU, to be trained or taken apart."""
    return load_model(checkpoint, torch.device("cpu"), torch.float32, ctx_size=ctx_size)


def load_model(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    attn: AttentionMode = "flash",
    ctx_size: int | None = None,
    progress: Progress | None = None,
    scheme: Scheme | None = None,
    outliers: Outliers | None = None,
    linear: Callable[[LazyTensor, torch.nn.Linear], CodesLinear | None] | None = None,
) -> Llama:
    """Build on the meta device, then assign tensor by tensor: at its peak, the finished model plus one tensor.

    With a `scheme`, every Linear but lm_head becomes an Int8Linear as its weight arrives; with `linear`, what that
    makes of it and its weight, unless this is None. Of a head that is the embedding, this gets the numbers.
    """
    tied = checkpoint.config.tie_word_embeddings and not checkpoint.config.num_labels
    with torch.device("meta"):
        model = Llama(checkpoint.config, attn, ctx_size)
    for tensor in TensorStream(checkpoint, progress):
        owner, _, leaf = tensor.name.rpartition(".")
        module = model.get_submodule(owner)
        made = linear(tensor, module) if linear and leaf == "weight" and isinstance(module, torch.nn.Linear) else None
        if made is not None:
            model.set_submodule(owner, made)
        elif scheme and leaf == "weight" and isinstance(module, torch.nn.Linear) and owner.startswith("model."):
            codes = _codes(checkpoint, tensor, scheme, device)
            model.set_submodule(owner, Int8Linear(codes, module.bias, scheme, outliers or Outliers()))
        elif linear and tied and isinstance(module, torch.nn.Embedding) and (head := linear(tensor, model.lm_head)):
            model.set_submodule("lm_head", head)
            module.weight = torch.nn.Parameter(head.dequantized().to(dtype))
        else:
            setattr(module, leaf, torch.nn.Parameter(floats(checkpoint, tensor, device, dtype)))
    model.tie_weights()
    if unset := [name for name, parameter in model.named_parameters() if parameter.is_meta]:
        raise ValueError(f"the checkpoint has no tensor {unset[0]}")
    return model


def floats(checkpoint: Checkpoint, tensor: LazyTensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A tensor as it is stored, or as the numbers that its codes stand for. Raises BadFile for infinity and NaN."""
    array = tensor.read()
    check_finite(checkpoint.path, tensor.name, array)
    weight = to_torch(array, device, dtype)
    if dtype == torch.float16 and tensor.dtype != "F16" and not weight.isfinite().all():
        problem = "holds numbers too large for f16; take bf16 or f32"
        raise BadRequest(f"{checkpoint.path}: tensor {tensor.name!r} {problem}")
    return weight


def _codes(checkpoint: Checkpoint, tensor: LazyTensor, scheme: Scheme, device: torch.device) -> Int8Codes:
    """Those of the file, where it has them; they are never made from codes that were made into floats."""
    if tensor.shape[1] > LONGEST_ROW:
        problem = f"has rows of {tensor.shape[1]} weights, too long for sums of 8-bit products in 32 bits"
        raise BadRequest(f"{checkpoint.path}: {tensor.name} {problem}; leave quantize out")
    if tensor.read_blocks and (own := packed(scheme, tensor.dtype)).holds(tensor.dtype):
        scale, q = int8_rows.split(tensor.read_blocks())
        scales = to_torch(scale[:, None], device, torch.float32)
        return Int8Codes(to_torch(q, device, torch.int8), scales, turned=own.turned)
    return weight_codes(floats(checkpoint, tensor, device, torch.float32), scheme)


def to_torch(array: NDArray[Any], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Never a view of a memory map: a module may be trained, a file must not change."""
    array = np.require(array, requirements=("C", "W"))
    if array.dtype == PLAIN_DTYPES["BF16"]:  # numpy's bfloat16 is a stranger to torch
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16).to(device, dtype)
    return torch.from_numpy(array).to(device, dtype)
