"""pronk as a model of lm-evaluation-harness (the extra `eval`), with any quantization:

    python -m pronk.measure.lm_eval --model pronk --model_args pretrained=smollm2:135m,quantize=llm-int8 --tasks boolq

is lm_eval's own command line with a model `pronk` more; model_args are the options of pronk.load. In Python,
`register()` adds the model, for lm_eval.simple_evaluate(model="pronk", ...). Importing this module imports nothing of
the harness.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from inspect import signature
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

import pronk
from pronk.checkpoint.tensors import Progress
from pronk.engine.filters import FILTER_NAMES
from pronk.engine.generation import Generation
from pronk.errors import BadRequest, PronkError
from pronk.llm import LLM
from pronk.measure.scoring import Score, Scorer
from pronk.measure.watched import Told
from pronk.tokenizer import chat

NAME = "pronk"
_log = logging.getLogger("lm_eval.pronk")  # under the harness's own, which shows it
_SHAPES = ("temperature", *FILTER_NAMES)  # of a distribution that tokens are drawn from
_TOGETHER = 64  # prompts of one call: as many as the scheduler runs at once


class Model:
    """What the harness asks of a language model. Its own half, TemplateLM, joins in `register`."""

    cache_hook: Any
    progress: Progress | None = None  # told instead of a bar being drawn

    def __init__(self, pretrained: str | LLM | None = None, **options: Any) -> None:
        """`pretrained`: a model that is loaded, or what pronk.load takes, with its `options`."""
        super().__init__()
        if unknown := options.keys() - signature(pronk.load).parameters.keys():
            raise BadRequest(f"model_args has {min(unknown)!r}, which is no option of pronk.load")
        self.llm = pretrained if isinstance(pretrained, LLM) else pronk.load(pretrained, **options)
        self.tokenizer = self.llm.tokenizer
        self._scorer = Scorer(self.llm)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: Mapping[str, Any], additional_config: object = None) -> Model:
        """`additional_config`: what the harness gives every model, a device among it (cuda:0 unless told otherwise).

        It is left aside: which engine runs a model, and where, is for model_args to say.
        """
        return cls(**arg_dict)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: object = None) -> Model:
        return cls(**import_module("lm_eval.utils").simple_parse_args_string(arg_string))

    @property
    def eot_token_id(self) -> int:
        if not self.llm.eos_ids:
            raise PronkError(f"{self.llm.name} has no token that ends a text, which the harness needs")
        return self.llm.eos_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """What texts without a context are predicted from: as with the harness's own Hugging Face models."""
        return self.eot_token_id if self.tokenizer.bos_id is None else self.tokenizer.bos_id

    @property
    def max_length(self) -> int:
        return self.llm.ctx_size

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **others: Any) -> list[int]:
        return self.tokenizer.encode(string, bos=False if add_special_tokens is False else None)

    # -- likelihoods --

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **others: Any
    ) -> list[Score]:
        pairs = [self._fitting(context, continuation) for _, context, continuation in requests]
        _tell_cuts([len(context) - len(kept) for (_, context, _), (kept, _) in zip(requests, pairs, strict=True)])
        with self._bar(len(pairs), "Running loglikelihood requests", disable_tqdm) as bar:
            scores = self._scorer.score(pairs, bar.update)
        for (key, _, _), score in zip(requests, scores, strict=True):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, score)
        return scores

    def _fitting(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """The harness's rule for what is too long: the context loses its beginning."""
        over = len(context) + len(continuation) - 1 - self.max_length
        if over >= len(context):
            raise PronkError(
                f"a continuation of {len(continuation)} tokens does not fit into the context of {self.max_length}"
            )
        return context[max(over, 0) :], continuation

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, in windows of the full context."""
        utils = import_module("lm_eval.utils")
        windows: list[tuple[Any, list[int], list[int]]] = []
        ends = [0]
        for (text,) in (request.args for request in requests):
            ids = self.tok_encode(text)
            rolled = utils.get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            windows += [(None, *utils.make_disjoint_window(window)) for window in rolled]
            ends.append(len(windows))
        scores = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm)
        sums = [sum(score for score, _ in scores[at:end]) for at, end in pairwise(ends)]
        for request, found in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, found)
        return sums

    # -- texts --

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        normalized = import_module("lm_eval.models.utils").normalize_gen_kwargs
        texts = [""] * len(requests)
        alike: dict[str, list[int]] = {}  # requests that ask for the same decoding run together
        for number, request in enumerate(requests):
            alike.setdefault(repr(request.args[1]), []).append(number)
        with self._bar(len(requests), "Running generate_until requests", disable_tqdm) as bar:
            for numbers in alike.values():
                asked = normalized(requests[numbers[0]].args[1])
                most = 1 if asked["do_sample"] else _TOGETHER
                for at in range(0, len(numbers), most):
                    few = numbers[at : at + most]
                    made = self._generate([requests[number].args[0] for number in few], asked)
                    for number, text in zip(few, made, strict=True):
                        texts[number] = text
                        self.cache_hook.add_partial("generate_until", requests[number].args, text)
                    bar.update(len(few))
        return texts

    def _generate(self, contexts: list[str], asked: Mapping[str, Any]) -> list[str]:
        sampling = sampling_of(asked)
        room = self.max_length - sampling["max_new_tokens"]
        if room < 1:
            raise PronkError(
                f"{sampling['max_new_tokens']} new tokens leave no room for a prompt in the context of "
                f"{self.max_length}; ask for fewer (--gen_kwargs max_gen_toks=N)"
            )
        prompts = [self.tok_encode(context) for context in contexts]
        _tell_cuts([max(len(prompt) - room, 0) for prompt in prompts])
        # Greedy decoding draws no number. Where one is drawn, it is the harness's seed that decides.
        seed = int(np.random.randint(1 << 31)) if asked["do_sample"] else None
        kept = [prompt[-room:] for prompt in prompts]
        return [made.text for made in cast(list[Generation], self.llm.generate(kept, seed=seed, **sampling))]

    @contextmanager
    def _bar(self, total: int, title: str, disabled: bool) -> Iterator[Any]:
        if not self.progress:
            with import_module("tqdm").tqdm(total=total, desc=title, disable=disabled) as bar:
                yield bar
            return
        yield SimpleNamespace(update=Told(self.progress, title, total))

    # -- chats --

    @property
    def tokenizer_name(self) -> str:
        return str(self.llm.path)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._template(chat_template).source if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if add_generation_prompt:
            return self._template(True).render(chat_history)
        # The last answer is only begun: what a template writes after it is no part of it.
        whole = self._template(True).render(chat_history, add_generation_prompt=False)
        begun = chat_history[-1]["content"].strip()
        return whole[: whole.rindex(begun) + len(begun)]

    def _template(self, name: bool | str) -> chat.ChatTemplate:
        return chat.choose(self.tokenizer, name if isinstance(name, str) else None)


def sampling_of(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Options of LLM.generate for a task's generation_kwargs, as the harness has normalized them.

    Raises BadRequest for one that pronk does not have.
    """
    left = dict(asked)
    sampling = {"max_new_tokens": left.pop("max_gen_toks"), "stop": tuple(text for text in left.pop("until") if text)}
    drawn = left.pop("do_sample")
    for name in _SHAPES:
        value = left.pop(name, None)
        if drawn and value is not None:  # tasks give them with greedy decoding as well, where they mean nothing
            sampling[name] = value
    for name in ("repetition_penalty", "num_beams"):
        if name in left:
            sampling[name] = left.pop(name)
    if left:
        raise BadRequest(f"generation_kwargs has {min(left)!r}, which pronk does not have")
    return sampling


def _tell_cuts(cuts: Sequence[int]) -> None:
    if some := sum(map(bool, cuts)):
        _log.warning(
            "%d of %d prompts did not fit and lost their beginning, %d tokens at most", some, len(cuts), max(cuts)
        )


@cache
def register() -> type[Model]:
    """The model's class, known to the harness as `pronk` from now on. Raises PronkError where there is no harness."""
    try:
        template, registry = import_module("lm_eval.api.model").TemplateLM, import_module("lm_eval.api.registry")
    except ModuleNotFoundError as error:
        raise PronkError(f"lm-evaluation-harness is not installed ({error}); pip install 'pronk[eval]'") from None
    import_module("lm_eval.models")  # or the harness, finding a model, would take its own for registered as well
    joined = type("Pronk", (Model, template), {"__doc__": Model.__doc__})
    registry.register_model(NAME)(joined)
    return joined


def main() -> None:
    try:
        register()
        import_module("lm_eval.__main__").cli_evaluate()
    except PronkError as error:
        sys.exit(f"pronk: {error}")


if __name__ == "__main__":
    main()
