"""Asked: a request of any of the APIs made into what the engine is to compute, and nothing of it dropped unsaid."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pronk.engine.filters import FILTER_NAMES
from pronk.engine.params import SamplingParams
from pronk.errors import BadRequest, short
from pronk.grammar.structure import Structure
from pronk.prompts import checked_ids
from pronk.serve.engine import Wanted
from pronk.serve.failures import ApiError, about, renamed
from pronk.serve.forms import asks_for_one, form_of
from pronk.serve.models import Leased
from pronk.serve.tools import Toolset, toolset

if TYPE_CHECKING:
    from pronk.engine.grammar import Grammar
    from pronk.llm import LLM
    from pronk.serve.requests import Sampling
    from pronk.tokenizer.messages import Overflow

FEW, _A_PROMPT = 2048, 64  # letters or ids: so many are made ready sooner than a thread has begun; and what each takes
MOST_LOGPROBS = 20  # alternatives of a token, as OpenAI has it
_LEAST_LETTERS, _LETTERS_A_TOKEN = 1 << 20, 16  # beyond which no text is cut into tokens, to see whether it fits
MOST_STOPS, MOST_STOP = 128, 1024  # stop strings, and letters of one: they are looked for at each token, by all
MOST_IDS = 1 << 16  # of stop_token_ids and logit_bias
_MOST_ENTRIES = 1 << 19  # log-probabilities of an answer with several texts, each of which the event loop writes
_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "rng", "length_penalty", "early_stopping", "stop_token_ids", "ignore_eos", "speculative",
)  # fmt: skip
# What a template is given by others than a request, and arguments of the functions that lead there.
_TAKEN = {
    "messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize", "tools_json",
    "self", "params", "overflow",
}  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """`copies`: how many times each text is given: greedy samples are all the same. `unheard`: fields of the request
    that change nothing, for the answer to say so."""

    leased: Leased
    wanted: Wanted
    copies: int = 1
    tools: Toolset | None = None
    unheard: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what else the answer is to say, a sentence each
    cut: int = 0  # tokens of the prompt, where a cut was asked for
    as_ids: bool = False  # log-probabilities name tokens by their ids

    @property
    def llm(self) -> LLM:
        return self.leased.llm

    @property
    def samples(self) -> int:
        """Texts of each prompt."""
        return self.wanted.params.samples * self.copies


def sampling(
    request: Sampling, advised: Mapping[str, Any], max_tokens: int, logprobs: int | None, max_samples: int
) -> tuple[SamplingParams, int]:
    """The parameters, and how many copies of each text. `advised`: by the model's makers, where nothing is asked.

    Raises ApiError.
    """
    n = 1 if request.n is None else request.n
    beams = 1 if request.num_beams is None else request.num_beams
    for name, value, most in (("n", n, max_samples), ("num_beams", beams, max_samples)):
        if not 1 <= value <= most:
            raise ApiError(400, f"{name} must be from 1 to {most}, not {value}", name)
    if logprobs is not None and not 0 <= logprobs <= MOST_LOGPROBS:
        raise ApiError(
            400, f"at most {MOST_LOGPROBS} alternatives of a token are given, not {logprobs}", "top_logprobs"
        )
    for name in ("stop_token_ids", "logit_bias"):
        if len(getattr(request, name) or ()) > MOST_IDS:
            raise ApiError(400, f"{name} has more than {MOST_IDS} tokens", name)
    options = {name: value for name in _FIELDS if (value := getattr(request, name)) is not None}
    if beams == 1:
        options = {"temperature": 1.0, **advised, **options}
        if options.get("top_k") == -1:  # vLLM's word for all of them
            options["top_k"] = 0
        if options["temperature"] == 0:  # greedy, whatever filters come along
            top_p = options.get("top_p") or 1.0  # 0 goes with a temperature of 0 for many
            _checked(**{**options, "temperature": 1.0, "top_p": top_p})
            options = {name: value for name, value in options.items() if name not in FILTER_NAMES}
    copies = n if beams == 1 and options["temperature"] == 0 else 1
    options |= {"num_beams": beams, "num_return_sequences" if beams > 1 else "n": n // copies}
    options |= {"max_new_tokens": max_tokens, "logprobs": logprobs, "logit_bias": _biases(request.logit_bias)}
    if request.stop is not None:
        options["stop"] = [request.stop] if isinstance(request.stop, str) else request.stop
        if len(options["stop"]) > MOST_STOPS:
            raise ApiError(400, f"stop has {len(options['stop'])} strings, and at most {MOST_STOPS} are taken", "stop")
        if long := [stop for stop in options["stop"] if len(stop) > MOST_STOP]:
            raise ApiError(400, f"a stop string has {len(long[0])} letters, and at most {MOST_STOP} are taken", "stop")
    return _checked(**options), copies


def _checked(**options: Any) -> SamplingParams:
    try:
        return SamplingParams(**options)
    except BadRequest as error:
        raise refused(error) from None


def _check_entries(params: SamplingParams, times: int, tokens: int, name: str = "top_logprobs") -> None:
    """`times`: texts of each sample; `tokens`: of a text at most. Raises ApiError."""
    texts = times * params.samples
    entries = texts * tokens * (1 + (params.logprobs or 0))
    if params.logprobs is not None and texts > 1 and entries > _MOST_ENTRIES:
        problem = (
            f"{texts} texts with log-probabilities may be {entries} numbers, and at most {_MOST_ENTRIES} are given; "
            f"lower max_tokens, {name} or n"
        )
        raise ApiError(400, problem, name)


def refused(error: BadRequest) -> ApiError:
    """A word of SamplingParams', with the field that is at fault."""
    message = str(error).replace("max_new_tokens", "max_tokens").replace("num_return_sequences", "n")
    word = message.partition(" ")[0].partition("=")[0]
    if word == "max_tokens":
        return ApiError(400, message, word)
    return ApiError(400, message, word if word in SamplingParams.__dataclass_fields__ else None)


def _biases(given: Mapping[str, float] | None) -> dict[int, float]:
    given = given or {}
    if not all(re.fullmatch("0|[1-9][0-9]{0,9}", token) for token in given):
        raise ApiError(400, 'logit_bias has token ids for keys, as in {"15043": -100}', "logit_bias")
    return {int(token): bias for token, bias in given.items()}


def conversation(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as clients have them, as templates know them: developer is system, and arguments are objects."""
    if not messages:
        raise ApiError(400, "messages is empty", "messages")
    found = []
    for number, message in enumerate(messages):
        message = {name: value for name, value in message.items() if value is not None or name == "content"}
        if message.get("role") == "developer":
            message["role"] = "system"
        if message.get("role") == "tool" and isinstance(message.get("content"), list):
            message["content"] = "".join(_of_part(number, part) for part in message["content"])
        for name in ("refusal", "audio", "annotations", "function_call"):
            if not message.get(name):
                message.pop(name, None)
        if calls := message.get("tool_calls"):
            if not isinstance(calls, list):
                raise ApiError(400, f"tool_calls of message {number} must be a list, not {short(calls)}", "messages")
            message["tool_calls"] = [_call(number, call) for call in calls]
        found.append(message)
    return found


def _of_part(number: int, part: object) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else None
    if not isinstance(text, str):
        raise ApiError(400, f"message {number} of a tool has a part that is no text, {short(part)}", "messages")
    return text


def _call(number: int, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(call, Mapping):
        raise ApiError(400, f"message {number} has a tool call without a function", "messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise ApiError(400, f"the arguments of a call in message {number} are not JSON", "messages") from None
    return {**call, "function": {**function, "arguments": arguments}}


def check_length(llm: LLM, given: object, param: str) -> None:
    """Raises ApiError for a text, or messages, that is far beyond the context. To cut a text into tokens takes some 280
    bytes of memory a letter, which would be 9 GB of the longest body that is read."""
    letters = _letters(given)
    most = max(_LEAST_LETTERS, _LETTERS_A_TOKEN * llm.ctx_size)
    if letters > most:
        problem = (
            f"{param} has {letters} letters, and for this model's maximum context length of {llm.ctx_size} tokens at "
            f"most {most} are read; shorten it"
        )
        raise ApiError(400, problem, param, "context_length_exceeded")


def _letters(given: object) -> int:
    """Of all texts and names within, and one for each other value: about what it takes as JSON, without making that."""
    letters, left = 0, [given]
    while left:
        value = left.pop()
        letters += len(value) if isinstance(value, str) else 1
        if isinstance(value, Mapping):
            left += value.keys()
            left += value.values()
        elif isinstance(value, list | tuple):
            left += value
    return letters


async def chat(
    leased: Leased,
    messages: Sequence[Mapping[str, Any]],
    request: Sampling,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    max_samples: int,
    unheard: list[str],
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    parallel: bool | None = None,
    variables: Mapping[str, Any] | None = None,
    begun: Sequence[int] = (),
    overflow: Overflow = "error",
) -> Asked:
    """Of a conversation, in whichever API. `begun`: tokens that the answer begins with, and goes on from. What
    takes the longer the more there is of it runs in a thread of its own. Raises ApiError, and PronkError for what the
    model, its template or llguidance refuses."""
    llm = leased.llm
    if variables and (taken := sorted(_TAKEN & variables.keys())):
        raise ApiError(400, f"chat_template_kwargs must not hold {taken[0]}", "chat_template_kwargs")
    if max_tokens is not None and max_tokens < 1:
        raise ApiError(400, f"max_tokens must be at least 1, not {max_tokens}", "max_tokens")
    params, copies = sampling(request, llm.checkpoint.generation.sampling, max_tokens or -1, logprobs, max_samples)

    def prepared() -> tuple[list[int], int, Toolset | None, Grammar | None]:
        known = conversation(messages)
        form, param = form_of(request)
        if begun and (tools or form):
            problem = "answer_ids cannot be had with tools or a form: they begin with the answer"
            raise ApiError(400, problem, "answer_ids")
        check_length(llm, [known, tools, variables], "messages")
        template = leased.adapter.template if leased.adapter else None
        called = toolset(tools, tool_choice, parallel, llm.template(template)) if tools or tool_choice else None
        given = {"tools": list(called.tools)} if called else {}
        with about("messages", "num_beams"):
            ids, left_out = llm.fitted_chat(known, params, overflow, template, **given, **dict(variables or {}))
        if called and called.forced and called.dialect.token:
            ids += llm.tokenizer.encode(called.dialect.token, bos=False)
        with about("answer_ids"):
            ids += checked_ids(begun, llm.config.vocab_size)
        with about("messages", "truncate"):
            ids, cut = llm.fitted(ids, params, request.truncate)  # type: ignore[arg-type]
        return ids, cut + left_out, called, _grammar(llm, form, param, called)

    ids, cut, called, grammar = await asyncio.to_thread(prepared)
    _check_entries(params, copies, min(params.max_new_tokens, llm.ctx_size - len(ids)))
    wanted = Wanted(leased.session, [ids], params, leased.adapter, grammar, leased.owner)
    return Asked(leased, wanted, copies, called, unheard, cut=cut, as_ids=bool(request.return_tokens_as_token_ids))


async def completion(
    leased: Leased,
    prompts: Sequence[str | Sequence[int]],
    request: Sampling,
    *,
    max_tokens: int,
    logprobs: int | None,
    max_samples: int,
    unheard: list[str],
    echo: bool = False,
) -> Asked:
    """Of prompts as they are. `max_tokens` 0 is for what scores them, and generates nothing."""
    llm = leased.llm
    if max_tokens < 0:
        raise ApiError(400, f"max_tokens must not be negative, as {max_tokens} is", "max_tokens")
    advised = llm.checkpoint.generation.sampling
    with renamed({"top_logprobs": "logprobs"}):
        params, copies = sampling(request, advised, max(1, max_tokens), logprobs, max_samples)

    formed = asks_for_one(request)
    longest = max((len(one.encode(errors="replace") if isinstance(one, str) else one) for one in prompts), default=0)
    echoed = longest * echo  # bytes or ids: tokens are fewer
    _check_entries(params, copies * len(prompts), min(llm.ctx_size, max_tokens + echoed), "logprobs")

    def prepared() -> tuple[list[list[int]], int, Grammar | None]:
        form, param = form_of(request) if formed else (None, "")
        for prompt in prompts:
            if isinstance(prompt, str):
                check_length(llm, prompt, "prompt")
        with about("prompt", "truncate"):
            found = [llm.fitted(prompt, params, request.truncate) for prompt in prompts]  # type: ignore[arg-type]
        return [ids for ids, _ in found], sum(cut for _, cut in found), _grammar(llm, form, param)

    ready: tuple[list[list[int]], int, Grammar | None] | None = None
    if not formed and sum(_A_PROMPT + len(prompt) for prompt in prompts) < FEW:
        with llm.tokenizer.at_once() if llm.has_tokenizer else nullcontext(True) as at_once:
            ready = prepared() if at_once else None  # of another's long text the tokenizer may be busy for seconds
    encoded, cut, grammar = await asyncio.to_thread(prepared) if ready is None else ready
    wanted = Wanted(leased.session, encoded, params, leased.adapter, grammar, leased.owner)
    return Asked(leased, wanted, copies, None, unheard, cut=cut, as_ids=bool(request.return_tokens_as_token_ids))


def _grammar(llm: LLM, form: Structure | None, param: str, called: Toolset | None = None) -> Grammar | None:
    """Raises ApiError, which names the field that asks for what cannot be followed."""
    try:
        alone = llm.grammar(form) if form else None  # beside tools, too: what is wrong with it is its field's fault
    except BadRequest as error:
        raise ApiError(400, str(error), param) from None
    if not called:
        return alone
    structure = called.structure(form)
    try:
        return llm.grammar(structure) if structure else None
    except BadRequest as error:
        raise ApiError(400, called.told(str(error)), "tools") from None
