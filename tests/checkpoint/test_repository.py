"""Which files of a repository are fetched, and which of several models a name means."""

from __future__ import annotations

import pytest

from pronk.checkpoint.hub.repository import Model, Repository, choose, has_all_pieces, models_in
from pronk.errors import ModelNotFound

LLAMA = """.gitattributes LICENSE README.md USE_POLICY.md config.json generation_config.json original/params.json
    model-00001-of-00002.safetensors model-00002-of-00002.safetensors model.safetensors.index.json tokenizer.json
    original/consolidated.00.pth original/tokenizer.model special_tokens_map.json tokenizer_config.json""".split()
MISTRAL = "config.json params.json consolidated.safetensors model.safetensors tokenizer.json adapter_model.safetensors"
QUANTS = [f"m-{q}.gguf" for q in ("BF16", "F16", "Q4_0", "Q4_0_4_4", "Q4_K_M", "Q4_K_S")]
SPLIT = [f"Q8_0/m-Q8_0-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
TINYLLAMAS = ["stories15M.bin", "stories15M.pt", "stories260K/stories260K.bin", "stories260K/tok512.bin"]


def pick(files: list[str], part: str | None = None) -> Model:
    return choose(files, Repository("a/b", None, part))


def refusal(files: list[str], part: str | None = None) -> str:
    with pytest.raises(ModelNotFound) as caught:
        pick(files, part)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_safetensors_and_what_goes_with_them() -> None:
    assert pick(LLAMA).entry == ""
    assert set(pick(LLAMA).files) == set(
        """config.json generation_config.json model.safetensors.index.json
        model-00001-of-00002.safetensors model-00002-of-00002.safetensors special_tokens_map.json tokenizer.json
        tokenizer_config.json""".split()
    )


def test_metas_own_files_only_when_asked() -> None:
    assert pick(LLAMA, "original") == pick(LLAMA, "original/")
    assert pick(LLAMA, "original").entry == "original"
    assert set(pick(LLAMA, "original").files) == {f for f in LLAMA if f.startswith("original/")}


def test_metas_own_files_where_there_is_nothing_else() -> None:
    files = ["params.json", "tokenizer.model", "consolidated.00.pth", "checklist.chk"]
    assert set(pick(files).files) == set(files[:3])


def test_the_model_once_and_no_adapters() -> None:
    assert set(pick(MISTRAL.split()).files) == {"config.json", "params.json", "model.safetensors", "tokenizer.json"}


def test_weights_without_a_config_are_no_model() -> None:
    assert "holds no" in refusal(["diffusion.safetensors", "README.md"])
    assert "holds no" in refusal(["config.json", "optimizer.bin"])


def test_torch_archives_where_there_is_no_safetensors() -> None:
    old = ["config.json", "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin", "training_args.bin"]
    assert set(pick(old).files) == set(old[:3])
    assert has_all_pieces(pick(old))
    assert set(pick([*old, "model.safetensors"]).files) == {"config.json", "model.safetensors"}


def test_one_gguf_needs_no_choice() -> None:
    assert pick(["README.md", "m.gguf"]) == Model("m.gguf", ("m.gguf",))
    assert pick(SPLIT) == Model(SPLIT[0], tuple(SPLIT))


def test_gguf_beside_safetensors_only_when_asked() -> None:
    assert pick([*LLAMA, "m.gguf"]) == pick(LLAMA)
    assert pick([*LLAMA, "m.gguf"], "m.gguf").files == ("m.gguf",)


def test_several_gguf_files_need_one() -> None:
    line = refusal(QUANTS)
    assert "several models" in line
    assert "a/b:PART" in line
    assert all(name in line for name in QUANTS)


@pytest.mark.parametrize(
    ("part", "file"),
    [
        ("m-Q4_0.gguf", "m-Q4_0.gguf"),
        ("Q4_0", "m-Q4_0.gguf"),
        ("f16", "m-F16.gguf"),
        ("bf16", "m-BF16.gguf"),
        ("q4_k_m", "m-Q4_K_M.gguf"),
        ("Q8_0", SPLIT[0]),
        ("K_S", "m-Q4_K_S.gguf"),
    ],
)
def test_as_much_of_a_name_as_it_takes(part: str, file: str) -> None:
    assert pick(QUANTS + SPLIT, part).entry == file


def test_too_little_of_a_name() -> None:
    line = refusal(QUANTS, "Q4_K")
    assert "2 models fit 'Q4_K'" in line
    assert "m-Q4_0.gguf" not in line
    assert "no model fits 'Q5'" in refusal(QUANTS, "Q5")
    assert "no model fits 'x'" in refusal(LLAMA, "x")


def test_llama2c_with_its_tokenizer() -> None:
    assert list(models_in(TINYLLAMAS)) == ["stories15M.bin", "stories260K/stories260K.bin"]
    assert set(pick(TINYLLAMAS, "stories260K").files) == {"stories260K/stories260K.bin", "stories260K/tok512.bin"}


def test_pieces_are_counted() -> None:
    assert has_all_pieces(pick(SPLIT))
    assert not has_all_pieces(pick(SPLIT[:2]))
    assert not has_all_pieces(pick(["config.json", "model-00002-of-00002.safetensors"]))
    assert has_all_pieces(pick(LLAMA))
