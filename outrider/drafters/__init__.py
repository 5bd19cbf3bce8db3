"""The table of drafters. The command line, the docs and the conformance tests read it; adding one is a file and a line."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Mapping

from ..errors import LoadError, ParameterError
from ..options import fill
from ..targets.base import Target
from .base import Ask, Budget, Drafter, NoDrafter, Options, State

__all__ = [
    "TABLE",
    "Ask",
    "Budget",
    "Drafter",
    "Entry",
    "NoDrafter",
    "Options",
    "State",
    "find_drafter",
    "load_drafter",
    "make_options",
]


@dataclass(frozen=True)
class Entry:
    """One line of the table: where a drafter lives and what a user should know before choosing it."""

    place: str
    """``module:Class`` below this package."""
    summary: str
    needs: str
    shapes: tuple[str, ...]
    """Of ``chain`` and ``tree``, what it can draft."""
    source: str
    """Paper or engine that the method comes from."""
    cost: str = "next to nothing"
    """Of a draft, in words."""
    exact: bool = True
    """Whether the output keeps the target's law, whatever it drafts. (A lossy accept rule is another matter.)"""

    def load(self) -> type[Drafter]:
        module, name = self.place.split(":")
        return getattr(importlib.import_module(f".{module}", __package__), name)


TABLE: dict[str, Entry] = {
    "auto": Entry(
        "auto:AutoDrafter",
        "in each round the one of several that pays, or none: `suffix`, what the target's checkpoint or Outrider holds for it, and what is given",
        "nothing; more drafters with `-o model=A,B`",
        ("chain", "tree"),
        "",
        "that of the one chosen",
    ),
    "none": Entry("base:NoDrafter", "plain decoding", "nothing", ("chain",), ""),
    "lookup": Entry(
        "lookup:LookupDrafter",
        "copies what followed the last few tokens when they last occurred",
        "nothing",
        ("chain",),
        "prompt lookup decoding (Saxena 2023)",
    ),
    "suffix": Entry(
        "suffix:SuffixDrafter",
        "what followed the longest repeated suffix of prompt and output, by counts",
        "nothing",
        ("chain", "tree"),
        "SuffixDecoding (Oliaro et al. 2024)",
    ),
    "prediction": Entry(
        "prediction:PredictionDrafter",
        "follows a text that the caller expects, and finds its place again after a miss",
        "the expected text",
        ("chain",),
        "predicted outputs (OpenAI API)",
    ),
    "model": Entry(
        "model:ModelDrafter",
        "a smaller causal language model, with the same vocabulary or another",
        "a model",
        ("chain", "tree"),
        "speculative decoding (Leviathan et al. 2023, Chen et al. 2023)",
        "a pass of the model for each level",
    ),
    "medusa": Entry(
        "medusa:MedusaDrafter",
        "heads on the target's last hidden state, one for each distance",
        "Medusa heads for this target",
        ("chain", "tree"),
        "Medusa (Cai et al. 2024)",
        "an output matrix for each level",
    ),
    "hydra": Entry(
        "hydra:HydraDrafter",
        "Medusa's heads, which also see the tokens drafted before theirs",
        "Hydra heads for this target",
        ("chain", "tree"),
        "Hydra (Ankner et al. 2024)",
        "an output matrix for each level; prefix-mlp: a decoder layer for each new token besides",
    ),
    "eagle": Entry(
        "eagle:EagleDrafter",
        "a decoder layer that goes on from the target's hidden states and its own",
        "an EAGLE head for this target",
        ("chain", "tree"),
        "EAGLE-1, 2 and 3 (Li et al. 2024, 2025)",
        "a decoder layer and an output matrix for each level",
    ),
    "mtp": Entry(
        "mtp:MtpDrafter",
        "the modules for the tokens after the next that a model was published with",
        "a model with such modules, as the target",
        ("chain", "tree"),
        "multi-token prediction (DeepSeek-V3 2024, Gloeckle et al. 2024)",
        "a decoder layer and an output matrix for each level",
    ),
    "dflash": Entry(
        "dflash:DFlashDrafter",
        "a whole block at once, from mask tokens and the target's hidden states",
        "a DFlash drafter for this target",
        ("chain", "tree"),
        "DFlash (Chen et al. 2026)",
        "one pass of a few decoder layers",
    ),
    "early-exit": Entry(
        "early_exit:EarlyExitDrafter",
        "the target itself without some of its layers, on the target's own cache",
        "nothing",
        ("chain", "tree"),
        "Draft & Verify (Zhang et al. 2024), LayerSkip (Elhoushi et al. 2024)",
        "a pass without these layers for each level",
    ),
    "replay": Entry(
        "replay:ReplayDrafter",
        "drafts a fixed script of tokens, with errors where asked; for tests",
        "a script",
        ("chain", "tree"),
        "",
    ),
}


def make_options(cls: type[Options], values: Mapping[str, Any], drafter: str) -> Options:
    """Options from names and values; strings, as the command line has them, become what the field's type says."""
    return fill(cls, values, f"the drafter {drafter!r}", "option")


def find_drafter(name: str, options: Mapping[str, Any]) -> tuple[str, str | None, dict[str, Any], str]:
    """The drafter's name in the table, where its weights are, its own options, and in words what kind of weights was found.

    name: of the table, with ``model`` among the options for weights; or the path or hub id of weights, which say themselves
    what they are. Raises LoadError for what cannot draft.
    """
    options = dict(options)
    if name not in TABLE:
        from .detect import detect

        found = detect(name)
        return found.drafter, name, options, found.dialect
    source = options.pop("model", None) if TABLE[name].load().takes_model else None
    return name, source, options, ""


def load_drafter(name: str, target: Target, options: Mapping[str, Any] | None = None, **loading: Any) -> Drafter:
    """The drafter called `name` for `target`: a name of the table, or the path or hub id of a model or of heads.

    options: the drafter's own, by name. loading: how to load a model (``device``, ``dtype``, ...), for drafters that have
    one. Raises ParameterError for an unknown drafter or option, LoadError for weights that do not load or fit.
    """
    name, source, own, dialect = find_drafter(name, options or {})
    cls = TABLE[name].load()
    made = make_options(cls.Options, own, name)
    if cls.takes_model and source is None:
        source = cls.inside(target)
        if source is None:
            raise ParameterError(
                f"the drafter {name!r} needs {TABLE[name].needs}: -d PATH_OR_HUB_ID, or -o model=PATH_OR_HUB_ID"
            )
    try:
        return cls.load(target, made, source, **loading)
    except LoadError as error:
        if name == "model" or not dialect:
            raise
        raise LoadError(f"{error} (found: {dialect})") from error
