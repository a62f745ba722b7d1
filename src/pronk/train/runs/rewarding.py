"""Rewarding: a run on preferences that makes a reward model, which scores answers and writes none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pronk.checkpoint.tensors import Checkpoint
from pronk.checkpoint.writers.safetensors import tokenizer_files
from pronk.checkpoint.writers.write import needs_tokenizer_files
from pronk.loading import load
from pronk.tokenizer import Tokenizer
from pronk.train.folder import MODEL
from pronk.train.reward import padded, with_score
from pronk.train.runs.options import Contradiction, How
from pronk.train.runs.tuning import Tuning
from pronk.train.settings import Settings


class Rewarding(Tuning):
    worse = "held-out pairs were never told apart better than by chance: take another --lr, or more data"

    def __init__(self, settings: Settings, how: How) -> None:
        super().__init__(settings, how)
        if how.samples_at == "looks":
            raise Contradiction(lambda o: f"{o('samples_at')} looks is of what a model writes, and this one scores")
        if settings.early_stop_task:
            raise Contradiction(lambda o: f"{o('early_stop_task')} asks what a model says, and this one scores")

    def _begun_as(self, checkpoint: Checkpoint, codec: Tokenizer) -> Checkpoint:
        return with_score(checkpoint, codec, self.settings.seed)

    def _files(self, checkpoint: Checkpoint, codec: Tokenizer) -> Mapping[str, bytes] | None:
        """All of the tokenizer's, wherever they go: they name the token that the model takes for padding."""
        assert checkpoint.tokenizer
        files = super()._files(checkpoint, codec)
        if files is None and not needs_tokenizer_files(checkpoint):
            files = tokenizer_files(checkpoint.tokenizer)
        return None if files is None else padded(files, codec)

    def _before(self, place: Mapping[str, Any]) -> list[str]:
        return []  # from a head that is drawn

    def _samples(self, before: list[str], place: Mapping[str, Any]) -> list[dict[str, str]]:
        """Held-out pairs with the scores that their answers get."""
        pairs = self.data.held_out[: self.how.samples]
        if not pairs:
            return []
        assert self.how.out
        lora = self.settings.lora
        model = self.settings.model if lora else str(self.how.out / MODEL)
        loading = {"tokenizer": self.how.tokenizer, "adapter": self.how.out, "merge_adapter": lora.dora} if lora else {}
        with self.watcher.progress("loading") as advance:
            llm = load(model, **loading, **place, prefix_cache=0, progress=advance)  # type: ignore[arg-type]
        with self.watcher.progress("writing", "tokens") as advance:
            texts = [answer.ids.tolist() for pair in pairs for answer in pair.answers.values()]
            scores = iter(llm.score(texts, progress=advance))  # type: ignore[arg-type]
        decode, found = self.prepared.tokenizer.decode, []
        for pair in pairs:
            ids = [answer.ids.tolist() for answer in pair.answers.values()]
            shared = next((n for n, (a, b) in enumerate(zip(*ids, strict=False)) if a != b), min(map(len, ids)))
            said = {name: decode(text[shared:]).strip() for name, text in zip(pair.answers, ids, strict=True)}
            scored = {name: f"{next(scores):+.3f}  {text}" for name, text in said.items()}
            found.append({"prompt": decode(ids[0][:shared]), **scored})
        return found
