"""From the source of a structure to llguidance's matcher of it. Imports nothing of pronk: work.py runs it, too."""

from __future__ import annotations

import json
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

# Left to itself a small model writes spaces and newlines until it is cut off: one space stands after a comma or a
# colon, or none, and nowhere else. A key spelled by the numbers of its characters would pass for another one. What is
# not known is refused rather than passed over.
JSON: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "json_allowed_escapes": 'bfnrt\\"',
    "coerce_one_of": False,
    "lenient": False,
}


def matcher(kind: str, source: str, tokenizer: llguidance.LLTokenizer) -> llguidance.LLMatcher:
    """At the beginning of a text. Raises ValueError, which says what cannot be followed."""
    found = llguidance.LLMatcher(tokenizer, _grammar(kind, source), log_level=0, limits=_limits())
    if not found.is_error():
        found.compute_bitmask()  # a rule that leads nowhere is found by the first token only
    if found.is_error():
        raise ValueError(found.get_error())
    if found.is_stopped() and not found.is_accepting():
        raise ValueError("nothing can begin a text")
    return found


def _limits() -> llguidance.LLParserLimits:
    # A grammar is not repeated in its error. A member that may be left out takes four items of a row, and an object may
    # have a thousand of these: bounds.py.
    return llguidance.LLParserLimits(verbose_errors=False, max_items_in_row=5_000)


def _grammar(kind: str, source: str) -> str:
    if kind == "json_schema":
        return llguidance.LLMatcher.grammar_from_json_schema(source, overrides=JSON)
    if kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(source)
    if kind == "choice":
        # One word of the lexer's: of rules' alternatives its parser takes 2,000.
        words = " | ".join(map(json.dumps, json.loads(source)))
        return llguidance.LLMatcher.grammar_from_lark(f"start: WORD\nWORD: {words}")
    if "::=" in source and not is_lark_syntax(source):  # llama.cpp's GBNF
        try:
            source = gbnf_to_lark(source)
        except Exception as error:  # of several kinds, its own a plain Exception
            raise ValueError(str(error)) from None
    return llguidance.LLMatcher.grammar_from_lark(source)


def tokenizer(tokens: Any) -> llguidance.LLTokenizer:
    """`tokens`: what TokenizerWrapper asks for, and `eos_token_ids`."""
    made = llguidance.TokenizerWrapper(tokens)
    return llguidance.LLTokenizer(made, n_vocab=len(tokens.tokens), eos_token=list(tokens.eos_token_ids))
