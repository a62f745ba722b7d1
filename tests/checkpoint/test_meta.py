"""Meta's checkpoints in any number of shards, against the same model written by the safetensors package."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from formats import save_huggingface, save_meta
from numpy.typing import NDArray
from tiny import random_weights, tiny_config

from pronk.checkpoint.readers import huggingface, meta
from pronk.config import RopeScaling
from pronk.errors import BadFile, Unsupported

# Meta's files name no special tokens.
CONFIG = tiny_config(bos_token_id=None, eos_token_ids=())
WEIGHTS = random_weights(CONFIG)
SENTENCEPIECE = b"\n\x0c\n\x05<unk>\x15\0\0\0\0"
TIKTOKEN = b"IQ== 0\nIg== 1\n"


def edit(folder: Path, **changes: Any) -> Path:
    path = folder / "params.json"
    params = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in params.items() if value != "absent"}))
    return folder


def change_shard(folder: Path, rank: int, **changes: Any) -> None:
    """Replace tensors of one shard; a function makes the new one from the old, None removes it."""
    path = folder / f"consolidated.{rank:02d}.pth"
    state = torch.load(path)
    for name, change in changes.items():
        state[name] = change(state[name]) if callable(change) else change
    torch.save({name: tensor for name, tensor in state.items() if tensor is not None}, path)


@pytest.fixture
def two(tmp_path: Path) -> Path:
    return save_meta(tmp_path / "model", CONFIG, WEIGHTS, 2, "columns")


@pytest.mark.parametrize("split", ["columns", "rows"])
@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"num_key_value_heads": 8}])
def test_joined_shards_equal_the_whole_to_the_bit(
    tmp_path: Path, split: Any, shards: int, dtype: type, changes: dict[str, Any]
) -> None:
    config = tiny_config(bos_token_id=None, eos_token_ids=(), **changes)
    weights = {name: array.astype(dtype) for name, array in random_weights(config).items()}
    folder = save_meta(tmp_path / "meta", config, weights, shards, split)
    expected = huggingface.read(save_huggingface(tmp_path / "hf", config, weights))
    assert meta.detect(folder)
    checkpoint = meta.read(folder)
    assert checkpoint.config == expected.config == config
    assert (checkpoint.format, len(checkpoint.files)) == ("meta", shards)
    assert checkpoint.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        ours = checkpoint.tensors[name]
        assert (ours.name, ours.shape, ours.dtype, ours.nbytes) == (name, tensor.shape, tensor.dtype, tensor.nbytes)
        assert ours.read().dtype == tensor.read().dtype
        assert ours.read().tobytes() == tensor.read().tobytes(), name
    assert checkpoint.plan().loaded == expected.plan().loaded
    assert checkpoint.plan().peak == expected.plan().peak


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_mixed_up_axes_do_not_go_unnoticed(tmp_path: Path, shards: int) -> None:
    """The inverse of the test above: wo and w2 are told from the others only by how the pieces were cut."""
    config = tiny_config(num_key_value_heads=8, intermediate_size=64)  # every linear layer is a square
    weights = random_weights(config)
    folder = save_meta(tmp_path, config, weights, shards)
    wo = meta.read(folder).tensors["model.layers.0.self_attn.o_proj.weight"].read()
    np.testing.assert_array_equal(wo, weights["model.layers.0.self_attn.o_proj.weight"])
    pieces = [torch.load(f)["layers.0.attention.wo.weight"].numpy() for f in sorted(folder.glob("*.pth"))]
    assert shards == 1 or not np.array_equal(wo, np.concatenate(pieces, axis=0).reshape(64, 64))


def test_peak_is_the_model_and_one_tensor(tmp_path: Path) -> None:
    """Joining allocates each tensor once, and beside it at most a permuted piece."""
    config = tiny_config(hidden_size=512, head_dim=64, intermediate_size=1024, vocab_size=1024, num_hidden_layers=4)
    folder = save_meta(tmp_path, config, random_weights(config), 4)
    checkpoint = meta.read(folder)
    plan = checkpoint.plan()
    tracemalloc.start()
    try:
        loaded = [tensor.read() for tensor in checkpoint.tensors.values()]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Norms stay in the memory map, so that even less than `loaded` is allocated; 64 KiB for the objects themselves.
    assert sum(array.nbytes for array in loaded) == plan.loaded
    assert peak <= plan.peak + 65536


def test_a_shard_stands_for_the_model_and_may_be_safetensors_inside(two: Path) -> None:
    import safetensors.torch

    state = torch.load(two / "consolidated.01.pth")
    safetensors.torch.save_file(state, two / "consolidated.01.pth")
    checkpoint = meta.read(two / "consolidated.01.pth")
    for name, array in WEIGHTS.items():
        np.testing.assert_array_equal(checkpoint.tensors[name].read(), array)


def test_rotary_tables_are_ignored(two: Path) -> None:
    for rank in range(2):
        change_shard(two, rank, **{"layers.0.attention.inner_attention.rope.freqs": torch.ones(4)})
    assert len(meta.read(two).tensors) == len(WEIGHTS)


class TestParams:
    def read(self, tmp_path: Path, **changes: Any) -> Any:
        folder = save_meta(tmp_path / "model", CONFIG, WEIGHTS)
        return meta.read(edit(folder, **changes)).config

    def test_a_vocabulary_size_of_minus_one_is_that_of_the_embedding(self, tmp_path: Path) -> None:
        assert self.read(tmp_path, vocab_size=-1).vocab_size == 96
        assert self.read(tmp_path, vocab_size="absent").vocab_size == 96
        with pytest.raises(BadFile, match="vocab_size: 95, but the shards hold embeddings of 96"):
            self.read(tmp_path, vocab_size=95)

    def test_the_width_of_the_feed_forward_layer_is_checked(self, tmp_path: Path) -> None:
        assert self.read(tmp_path, multiple_of="absent").intermediate_size == 96
        with pytest.raises(BadFile, match="layers of 128, and the shards' are of 96"):
            self.read(tmp_path, multiple_of=64)

    @pytest.mark.parametrize(
        ("params", "width"),  # of the released models
        [
            ({"dim": 4096, "multiple_of": 256}, 11008),
            ({"dim": 5120, "multiple_of": 256}, 13824),
            ({"dim": 6656, "multiple_of": 256}, 17920),
            ({"dim": 8192, "multiple_of": 256}, 22016),
            ({"dim": 8192, "multiple_of": 4096, "ffn_dim_multiplier": 1.3}, 28672),
            ({"dim": 4096, "multiple_of": 1024, "ffn_dim_multiplier": 1.3}, 14336),
            ({"dim": 2048, "multiple_of": 256, "ffn_dim_multiplier": 1.5}, 8192),
            ({"dim": 3072, "multiple_of": 256, "ffn_dim_multiplier": 1.0}, 8192),
            ({"dim": 16384, "multiple_of": 4096, "ffn_dim_multiplier": 1.2}, 53248),
        ],
    )
    def test_the_formula_gives_the_widths_of_the_released_models(self, params: dict[str, Any], width: int) -> None:
        parsed = meta._params(Path("params.json"), params | {"n_layers": 1, "n_heads": 1})
        assert meta._feed_forward_size(parsed) == width

    @pytest.mark.parametrize(
        ("params", "context"),  # of the released models
        [
            ({"n_layers": 32, "norm_eps": 1e-6, "vocab_size": -1}, 2048),  # Llama 1 7B
            ({"n_layers": 80, "norm_eps": 1e-5}, 2048),  # Llama 1 65B
            ({"n_layers": 32, "norm_eps": 1e-5}, 4096),  # Llama 2 7B
            ({"n_layers": 80, "norm_eps": 1e-5, "n_kv_heads": 8}, 4096),  # Llama 2 70B
            ({"n_layers": 32, "norm_eps": 1e-5, "rope_theta": 1000000}, 16384),  # Code Llama 7B
            ({"n_layers": 32, "norm_eps": 1e-5, "n_kv_heads": 8, "rope_theta": 500000.0}, 8192),  # Llama 3 8B
            ({"n_layers": 32, "n_kv_heads": 8, "rope_theta": 5e5, "use_scaled_rope": True}, 131072),  # Llama 3.1 8B
            ({"n_layers": 32, "rope_theta": 5e5, "use_scaled_rope": True, "max_seq_len": 1000}, 1000),
        ],
    )
    def test_context_lengths_of_the_released_models(self, params: dict[str, Any], context: int) -> None:
        parsed = meta._params(Path("params.json"), params | {"dim": 64, "n_heads": 8})
        assert meta._context(parsed) == context

    def test_scaled_rotary_embeddings(self, tmp_path: Path) -> None:
        assert self.read(tmp_path, use_scaled_rope=False).rope_scaling is None
        # This model is narrow, like Llama 3.2's text models.
        assert self.read(tmp_path, use_scaled_rope=True).rope_scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)
        assert self.read(tmp_path, use_scaled_rope=True, rope_scaling_factor=16).rope_scaling.factor == 16.0
        wide = meta._params(Path(), {"dim": 4096, "n_layers": 32, "n_heads": 32, "use_scaled_rope": True})
        assert meta._rope_scaling(wide) == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)

    @pytest.mark.parametrize(
        "key", ["lora_args", "quantization_args", "moe_args", "vision_chunk_size", "sliding_window", "\n\u202e"]
    )
    def test_unknown_keys_are_refused_by_name(self, tmp_path: Path, key: str) -> None:
        with pytest.raises(Unsupported) as caught:
            self.read(tmp_path, **{key: {"x": 1}})
        assert f"{key!r}={{'x': 1}}" in str(caught.value)
        assert self.read(tmp_path, **{key: None}) == CONFIG

    @pytest.mark.parametrize(
        ("changes", "name"),
        [
            ({"dim": "absent"}, "dim: required and absent"),
            ({"n_layers": "absent"}, "n_layers: required and absent"),
            ({"n_heads": "absent"}, "n_heads: required and absent"),
            ({"dim": 64.0}, "dim: must be"),
            ({"dim": True}, "dim: must be"),
            ({"dim": 1 << 63}, "dim: must be"),
            ({"dim": 63}, "no multiple of n_heads"),
            ({"dim": 32, "multiple_of": "absent"}, "do not make 8 heads of 4"),
            ({"n_heads": 0}, "n_heads: must be"),
            ({"n_heads": 16}, "do not make 4 heads of 4"),
            ({"n_kv_heads": 3}, "num_key_value_heads"),
            ({"n_kv_heads": 8}, "do not make 8 heads"),
            ({"n_layers": 1 << 30}, "num_hidden_layers"),
            ({"n_layers": 3}, "absent"),
            ({"n_layers": 1}, "not part of this model"),
            ({"vocab_size": 0}, "vocab_size"),
            ({"ffn_dim_multiplier": 1e30}, "ffn_dim_multiplier: must be"),
            ({"multiple_of": 0}, "multiple_of: must be"),
            ({"norm_eps": "1e-5"}, "norm_eps: must be"),
            ({"norm_eps": 100}, "rms_norm_eps"),
            ({"rope_theta": -1}, "rope_theta: must be"),
            ({"use_scaled_rope": 1}, "use_scaled_rope: must be true or false"),
        ],
    )
    def test_broken_values_name_their_key(self, tmp_path: Path, changes: dict[str, Any], name: str) -> None:
        with pytest.raises(BadFile, match=name):
            self.read(tmp_path, **changes)

    def test_not_a_number(self, two: Path) -> None:
        (two / "params.json").write_text('{"dim": NaN}')
        with pytest.raises(BadFile, match=r"params\.json: NaN is not JSON"):
            meta.read(two)


class TestShards:
    def test_a_missing_number(self, tmp_path: Path) -> None:
        folder = save_meta(tmp_path, CONFIG, WEIGHTS, 4)
        (folder / "consolidated.01.pth").unlink()
        with pytest.raises(BadFile, match=r"shard consolidated\.01\.pth is absent"):
            meta.read(folder)

    @pytest.mark.parametrize("split", ["columns", "rows"])
    def test_the_last_one_missing_shows_in_the_shapes(self, tmp_path: Path, split: Any) -> None:
        folder = save_meta(tmp_path, CONFIG, WEIGHTS, 4, split)
        (folder / "consolidated.03.pth").unlink()
        with pytest.raises(BadFile):
            meta.read(folder)

    def test_one_too_many(self, two: Path) -> None:
        shutil.copy(two / "consolidated.00.pth", two / "consolidated.02.pth")
        with pytest.raises(BadFile):
            meta.read(two)

    def test_none(self, two: Path) -> None:
        for file in two.glob("*.pth"):
            file.unlink()
        assert not meta.detect(two)
        with pytest.raises(BadFile, match=r"no consolidated\.00\.pth"):
            meta.read(two)

    @pytest.mark.parametrize("name", ["norm.weight", "layers.0.attention.wq.weight", "tok_embeddings.weight"])
    def test_shapes_that_differ(self, two: Path, name: str) -> None:
        change_shard(two, 1, **{name: lambda tensor: tensor[:-2]})
        with pytest.raises(BadFile, match=rf"consolidated\.01\.pth: tensor '{name}': F32 .* but consolidated\.00\.pth"):
            meta.read(two)

    def test_types_that_differ(self, two: Path) -> None:
        change_shard(two, 1, **{"norm.weight": torch.Tensor.half})
        with pytest.raises(BadFile, match=r"F16 \(64,\), but consolidated\.00\.pth has F32"):
            meta.read(two)

    def test_names_that_differ(self, two: Path) -> None:
        change_shard(two, 1, **{"norm.weight": None})
        with pytest.raises(BadFile, match=r"tensor 'model\.norm\.weight': is in this shard or in"):
            meta.read(two)

    def test_foreign_tensors(self, two: Path) -> None:
        change_shard(two, 0, **{"layers.0.attention.wq.lora_a": torch.ones(2)})
        with pytest.raises(Unsupported, match=r"consolidated\.00\.pth: tensor 'layers\.0\.attention\.wq\.lora_a'"):
            meta.read(two)

    @pytest.mark.parametrize("shape", [(), (2, 3, 4), (64, 64, 1), (0,), (0, 0)])
    @pytest.mark.parametrize("name", ["norm.weight", "layers.0.attention.wq.weight", "tok_embeddings.weight"])
    def test_shapes_that_make_no_sense(self, two: Path, name: str, shape: tuple[int, ...]) -> None:
        for rank in range(2):
            change_shard(two, rank, **{name: torch.ones(shape)})
        with pytest.raises(BadFile):
            meta.read(two)

    def test_a_type_that_models_here_do_not_have(self, two: Path) -> None:
        for rank in range(2):
            change_shard(two, rank, **{"norm.weight": torch.Tensor.double})
        with pytest.raises(Unsupported, match=r"'norm\.weight' is stored as F64"):
            meta.read(two)

    def test_heads_that_shards_would_cut_in_two(self, tmp_path: Path) -> None:
        config = tiny_config(num_key_value_heads=2)
        with pytest.raises(BadFile, match="do not make 2 heads of 8 in 4 shards"):
            meta.read(save_meta(tmp_path, config, random_weights(config), 4))


class TestTokenizer:
    @pytest.mark.parametrize(("content", "kind"), [(SENTENCEPIECE, "sentencepiece"), (TIKTOKEN, "tiktoken")])
    def test_in_the_folder_or_above_it(self, two: Path, content: bytes, kind: str) -> None:
        assert meta.read(two).tokenizer is None
        (two.parent / "tokenizer.model").write_bytes(content)
        for path in (two.parent / "tokenizer.model", two / "tokenizer.model"):
            path.write_bytes(content)
            source = meta.read(two).tokenizer
            assert source is not None
            assert (source.kind, source.path) == (kind, path)

    def test_above_a_folder_given_as_a_relative_path(self, two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (two.parent / "tokenizer.model").write_bytes(SENTENCEPIECE)
        monkeypatch.chdir(two)
        assert meta.read(Path()).tokenizer is not None

    def test_a_file_that_is_no_tokenizer(self, two: Path) -> None:
        (two / "tokenizer.model").write_bytes(b"\0")
        with pytest.raises(BadFile, match="no tokenizer of a kind that pronk knows"):
            meta.read(two)


def test_a_lazy_tensor_reads_only_its_own_pieces(two: Path) -> None:
    """Reading norms needs rank 0 alone: rank 1 may be cut off behind its header and nobody notices."""
    tensors = meta.read(two).tensors
    with (two / "consolidated.01.pth").open("r+b") as file:
        file.truncate(100)
    norm: NDArray[Any] = tensors["model.norm.weight"].read()
    np.testing.assert_array_equal(norm, WEIGHTS["model.norm.weight"])
    with pytest.raises(BadFile, match=r"consolidated\.01\.pth.*has shrunk to 100 bytes"):
        tensors["lm_head.weight"].read()
