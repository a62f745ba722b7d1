"""Tuning: a run on records, which adapts a model that is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from pronk.checkpoint.tensors import Checkpoint
from pronk.checkpoint.writers.safetensors import tokenizer_files
from pronk.checkpoint.writers.write import needs_tokenizer_files
from pronk.errors import BadRequest, NoTokenizer, Unsupported
from pronk.loading import open_source, tokenizer_of
from pronk.tokenizer import Tokenizer
from pronk.tokenizer.export import huggingface_files
from pronk.train.data.sources import prepare
from pronk.train.data.token_cache import TokenCache
from pronk.train.folder import MODEL
from pronk.train.runs import answers
from pronk.train.runs.result import Result
from pronk.train.runs.run import Prepared, Run


class Tuning(Run):
    worse = "held-out loss never fell below MODEL's own: take a smaller --lr, fewer --epochs or more data"

    @cached_property
    def prepared(self) -> Prepared:
        settings = self.settings
        checkpoint = open_source(settings.model, self.how.tokenizer)
        codec = tokenizer_of(checkpoint)
        if codec is None:
            raise NoTokenizer(f"{settings.model} carries no tokenizer; name one with --tokenizer FILE")
        with self.watcher.progress("reading", "records") as advance:
            data = prepare(settings, codec, checkpoint.config.max_position_embeddings, advance, self._cache(checkpoint))
        begun = self._begun_as(checkpoint, codec)
        return Prepared(begun, codec, data, settings, self._files(checkpoint, codec))

    def _cache(self, checkpoint: Checkpoint) -> TokenCache | None:
        if not (self.how.token_cache and checkpoint.tokenizer):
            return None
        return TokenCache(checkpoint.tokenizer, self.watcher.note)

    def _begun_as(self, checkpoint: Checkpoint, codec: Tokenizer) -> Checkpoint:
        """What the run begins from."""
        if checkpoint.config.num_labels:
            raise BadRequest(
                f"{self.settings.model} is a reward model, which predicts no tokens; train the model that it was made "
                "from, or go on with pronk reward"
            )
        return checkpoint

    def _files(self, checkpoint: Checkpoint, codec: Tokenizer) -> Mapping[str, bytes] | None:
        """Of the tokenizer: beside an adapter all of them; beside a model those that the checkpoint has none of."""
        assert checkpoint.tokenizer
        alone = not checkpoint.tokenizer.path.with_name("tokenizer_config.json").is_file()
        if needs_tokenizer_files(checkpoint) or (self.settings.lora and alone):
            try:
                return huggingface_files(codec)
            except Unsupported as error:
                self.watcher.note(str(error))
                return None
        return tokenizer_files(checkpoint.tokenizer) if self.settings.lora else None

    def _note(self, ready: Prepared) -> None:
        for loss in ready.data.losses():
            self.watcher.note(loss)
        super()._note(ready)

    @cached_property
    def _asked(self) -> tuple[list[list[int]], list[dict[str, str]]]:
        return answers.prompts(self.data, self.prepared.tokenizer, self.how.samples)

    def _prompts(self) -> tuple[Sequence[Sequence[int]], Mapping[str, Any]]:
        return self._asked[0], {}

    def _before(self, place: Mapping[str, Any]) -> list[str]:
        return self._answered(self.settings.model, tokenizer=self.how.tokenizer, **place)

    def _answered(self, model: str, **loading: Any) -> list[str]:
        return answers.answered(model, self._asked[0], self.watcher, **loading)

    def _told(self, found: Result) -> Result:
        losses = found.held_out_loss
        if found.finished and losses and losses["kept"] >= losses["first"]:
            self.watcher.note(self.worse)
        return found

    def _samples(self, before: list[str], place: Mapping[str, Any]) -> list[dict[str, str]]:
        if self.settings.lora:
            loading: dict[str, Any] = {"tokenizer": self.how.tokenizer, "adapter": self.how.out, **place}
            loading["merge_adapter"] = self.settings.lora.dora
            after = self._answered(self.settings.model, **loading)
        else:
            assert self.how.out
            after = self._answered(str(self.how.out / MODEL), **place)
        return [
            {"prompt": self.prepared.tokenizer.decode(ids), "before": b.strip(), "after": a.strip(), **of_data}
            for ids, of_data, b, a in zip(*self._asked, before, after, strict=True)
        ]
