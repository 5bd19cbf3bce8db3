"""Structured output: what a grammar lets follow each path of a draft tree, by llguidance.

A Grammar is what a request asks for. A Matcher is one sequence's place in it. It answers for any path below the anchor: the
underlying parser goes down the path, and back to the common part for the next one, so each distinct path costs one mask. What
drafter and target ask about the same path in one round is the same mask, so q and p are constrained alike.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Sequence

import numpy as np
import torch
from torch import Tensor

from .errors import ParameterError
from .text import Tokenizer
from .tree import Budget, DraftTree

WHITESPACE = r"( |\r?\n( {0,32}|\t{0,8}))"
"""What may stand between the tokens of JSON, where a schema does not say it (``"x-guidance": {"whitespace_pattern": ...}``): one
space, or one line break with an indentation. Without a bound a model can write spaces until its tokens are used up."""
COMPILED = 64
"""How many compiled grammars are kept."""


@dataclass(frozen=True)
class Grammar:
    """What the output must look like. kind: a key of `KINDS`; source: its text (JSON for schemas and choices)."""

    kind: str
    source: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ParameterError(f"unknown kind of grammar {self.kind!r}; known: {', '.join(KINDS)}")

    def compiled_by(self, llguidance: Any) -> str:
        """The grammar as llguidance's matcher takes it."""
        matcher = llguidance.LLMatcher
        if self.kind == "regex":
            return matcher.grammar_from_regex(self.source)
        if self.kind == "lark":
            return matcher.grammar_from_lark(self.source)
        if self.kind == "choices":
            choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(self.source))
            return matcher.grammar_from_lark(f"start: {choices}")
        return matcher.grammar_from_json_schema(self.source, defaults={"whitespace_pattern": WHITESPACE})


KINDS = ("json_schema", "regex", "choices", "lark")


class Grammars:
    """Grammars over one tokenizer's vocabulary. Each is compiled once."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compiled = lru_cache(maxsize=COMPILED)(self._compile)

    def matcher(self, grammar: Grammar, ends: frozenset[int]) -> Matcher:
        """A sequence's matcher at the start of `grammar`. ends: the tokens that end the text, allowed where the grammar may end.

        Raises ParameterError for a grammar that is broken, or that asks for what is not supported.
        """
        return Matcher(self._compiled(grammar), self._vocab_size, ends)

    def _compile(self, grammar: Grammar) -> Any:
        llguidance = _llguidance()
        try:
            made = llguidance.LLMatcher(self._words, grammar.compiled_by(llguidance), log_level=0)
            message = made.get_error() if made.is_error() else ""
        except ValueError as error:  # of a schema that is nested too deeply, for one
            message = str(error)
        if message:
            lines = " ".join(line.strip() for line in message.strip().splitlines())
            raise ParameterError(f"{grammar.kind} cannot be used: {lines}")
        return made

    @cached_property
    def _words(self) -> Any:
        llguidance = _llguidance()
        from llguidance._tokenizer import TokenizerWrapper

        return llguidance.LLTokenizer(TokenizerWrapper(_Words(self._tokenizer, self._vocab_size)))


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ParameterError("structured output needs llguidance: pip install 'outrider[grammar]'") from None
    return llguidance


class _Words:
    """A tokenizer as llguidance asks for it: the bytes of each id, special ones apart.

    llguidance's own end token is one beyond the vocabulary: which tokens end a text is the sequence's to say.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        from .drafters.vocabulary import token_bytes

        known = token_bytes(tokenizer)
        self.eos_token_id = max(vocab_size, tokenizer.size)
        self.tokens = [known.get(token, b"") for token in range(self.eos_token_id)] + [b"<end>"]
        self.special_token_ids = [*sorted(tokenizer.special), self.eos_token_id]
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        """Token ids of a text that the grammar forces; none where the tokenizer cannot write it as it is.

        A tokenizer that puts a space before the first word is asked for the text on a line of its own.
        """
        if not isinstance(text, str):
            raise TypeError("a text is needed")
        first = self._encode("\n")
        for tokens in (self._encode(text), self._encode("\n" + text)[len(first) :]):
            if b"".join(self.tokens[token] for token in tokens) == text.encode():
                return tokens
        return []

    def _encode(self, text: str) -> list[int]:
        try:
            return self._tokenizer.encode_plain(text)
        except ParameterError:  # a toy that has no token for a letter
            return []


class Matcher:
    """One sequence's place in its grammar. Paths are the tokens below the anchor, as `DraftTree.path_tokens` gives them."""

    def __init__(self, compiled: Any, vocab_size: int, ends: frozenset[int]):
        self._compiled = compiled
        self._parser = compiled.deep_copy()
        self._vocab_size = vocab_size
        self._ends = ends
        self._emitted: list[int] = []
        self._at: list[int] = []  # the path below the anchor where the parser is
        self._masks: dict[tuple[int, ...], Tensor | None] = {}
        self._lost = False  # the parser gave up at emitted tokens
        self.trouble = ""
        """Why a grammar that can be compiled cannot be followed any further, if so: it is too complex there."""

    def mask(self, path: Sequence[int]) -> Tensor | None:
        """Which tokens may follow `path`: bool ``[V]``, on the CPU. None for a path that is not in the grammar, or has ended."""
        key = tuple(path)
        if self._lost:
            return torch.zeros(self._vocab_size, dtype=torch.bool)
        if key not in self._masks:
            self._masks[key] = self._mask() if self._go(key) else None
        return self._masks[key]

    def constrain(self, logits: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
        """Logits ``[n, V]`` with -inf for what may not follow each path; the rows of impossible paths stay as they are."""
        masks = [self.mask(path) for path in paths]
        if not any(mask is not None for mask in masks):
            return logits
        every = torch.ones(self._vocab_size, dtype=torch.bool)
        allowed = torch.stack([every if mask is None else mask for mask in masks])  # [n, V]
        return logits.masked_fill(~allowed.to(logits.device), -torch.inf)

    def fit(self, tree: DraftTree, budget: Budget) -> DraftTree:
        """The draft as the grammar has it: without tokens that may not follow, and with those that must.

        A token that may not follow goes with all below it; DraftError if it was drawn under a q. Where a path ends and the
        grammar leaves but one text to go on with, that text's tokens are added, as point masses, as far as the budget allows.
        """
        masks = [self.mask(tree.path_tokens(node)) for node in range(len(tree))]
        above = [masks[parent] for parent in tree.parents[1:]]
        tree = tree.prune([True, *(mask is not None and bool(mask[t]) for mask, t in zip(above, tree.tokens[1:]))])
        for leaf in [node for node, below in enumerate(tree.children) if not below and tree.law(node) is None]:
            room = min(budget.nodes + 1 - len(tree), budget.depth - tree.depths[leaf])
            tree = _with_chain(tree, leaf, self._forced(tree.path_tokens(leaf))[: max(room, 0)])
        return tree

    def is_over(self, path: Sequence[int]) -> bool:
        """Whether the grammar is complete after `path`, and nothing more may follow."""
        return not self._lost and self._go(path) and self._parser.is_stopped()

    def commit(self, tokens: Sequence[int]) -> None:
        """Take note of the tokens that were emitted."""
        if tokens and tokens[-1] in self._ends:  # not the parser's
            tokens = tokens[:-1]
        self._lost = self._lost or not self._go(tokens)
        self._emitted += tokens
        self._at = []
        self._masks.clear()

    def _go(self, path: Sequence[int]) -> bool:
        """Move the parser to `path`, or as far as it is in the grammar; whether it got there."""
        common = next((i for i, (a, b) in enumerate(zip(self._at, path)) if a != b), min(len(self._at), len(path)))
        if common < len(self._at):
            self._parser.rollback(len(self._at) - common)
            del self._at[common:]
        for token in path[common:]:
            if token in self._ends or not 0 <= token < self._vocab_size or not self._parser.try_consume_tokens([token]):
                self._check()
                return False
            self._at.append(token)
        return True

    def _mask(self) -> Tensor:
        bits = np.unpackbits(np.frombuffer(self._parser.compute_bitmask(), dtype=np.uint8), bitorder="little")
        mask = torch.from_numpy(bits[: self._vocab_size].view(np.bool_))  # [V]
        if not self._check():
            return torch.zeros_like(mask)
        mask[sorted(self._ends)] = self._parser.is_accepting()
        return mask

    def _forced(self, path: Sequence[int]) -> list[int]:
        tokens = self._parser.compute_ff_tokens() if self._go(path) and not self._parser.is_stopped() else []
        self._check()
        return tokens[: self._parser.validate_tokens(tokens)] if tokens else []

    def _check(self) -> bool:
        """False, and a parser anew, where the parser has given up: it never recovers, and the emitted tokens are still right."""
        if not self._parser.is_error():
            return True
        self.trouble = self.trouble or self._parser.get_error().strip().splitlines()[0]
        self._parser = self._compiled.deep_copy()
        self._parser.consume_tokens(self._emitted)
        self._at = []
        return False


def _with_chain(tree: DraftTree, node: int, tokens: Sequence[int]) -> DraftTree:
    """The tree with a chain of `tokens` below `node`, chosen without chance."""
    if not tokens:
        return tree
    n, more = len(tree), len(tokens)
    return replace(
        tree,
        tokens=(*tree.tokens, *tokens),
        parents=(*tree.parents, node, *range(n, n + more - 1)),
        q=None if tree.q is None else (*tree.q, *[None] * more),
        score=None if tree.score is None else (*tree.score, *[1.0] * more),
    )
