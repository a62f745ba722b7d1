"""/tokenize and /detokenize, in vLLM's form and in llama.cpp's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pronk.serve import asking
from pronk.serve.failures import ApiError, about
from pronk.serve.models import Leased
from pronk.serve.requests import DetokenizeRequest, TokenizeRequest
from pronk.serve.speech import warned

_HEEDED = {  # of the fields that one form has and another has not
    "prompt": {"add_special_tokens"},
    "messages": set[str](),
    "content": {"add_special", "parse_special", "with_pieces"},
}


def tokenize(leased: Leased, request: TokenizeRequest, unheard: Sequence[str]) -> dict[str, Any]:
    """`unheard`: fields that there are not, for the answer to say so. Raises ApiError, and BadRequest for text that is
    none."""
    given = [name for name in ("prompt", "messages", "content") if getattr(request, name) is not None]
    if len(given) != 1:
        raise ApiError(400, "give one of prompt, messages and content", given[1] if given else "prompt")
    notes = [
        f"{name} is not for {given[0]}; it changed nothing"
        for name in sorted(set[str]().union(*_HEEDED.values()) - _HEEDED[given[0]])
        if getattr(request, name) is not None
    ]
    return {**_tokens(leased, request, given[0]), **warned(unheard, notes)}


def _tokens(leased: Leased, request: TokenizeRequest, given: str) -> dict[str, Any]:
    llm = leased.llm
    asking.check_length(llm, getattr(request, given), given)
    if request.messages is not None:
        template = leased.adapter.template if leased.adapter else None
        with about("messages"):
            ids = llm.chat_prompt(asking.conversation(request.messages), template)
        return _vllm(leased, ids)
    if request.prompt is not None:
        bos = False if request.add_special_tokens is False else None
        return _vllm(leased, llm.tokenizer.encode(request.prompt, bos=bos))
    special = request.parse_special is not False
    bos = None if request.add_special else False
    ids = llm.tokenizer.encode(request.content or "", bos=bos, special=special)
    if not request.with_pieces:
        return {"tokens": ids}
    return {"tokens": [{"id": id, "piece": _piece(llm.tokenizer.token_bytes(id))} for id in ids]}


def detokenize(leased: Leased, request: DetokenizeRequest, unheard: Sequence[str]) -> dict[str, Any]:
    """Raises BadRequest for an id that there is not."""
    with about("tokens"):
        text = leased.llm.tokenizer.decode(request.tokens, skip_special=False)
    return {"prompt": text, "content": text, **warned(unheard)}


def _vllm(leased: Leased, ids: list[int]) -> dict[str, Any]:
    return {"tokens": ids, "count": len(ids), "max_model_len": leased.llm.ctx_size}


def _piece(spelled: bytes) -> str | list[int]:
    """As llama.cpp has it: bytes where they are no text."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return list(spelled)
