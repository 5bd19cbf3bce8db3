"""An independent draft model distilled from the target: some of its layers, and of its tokens those that its answers have most often.

It begins with a subset of the target's layers (as in Draft & Verify, Zhang et al. 2024, which leaves layers out) and learns the target's law
at every token of the answers. Its text is the data's own, which the target said (as in DistillSpec, Zhou et al. 2024). With fewer tokens than
the target it has a tokenizer of its own, and reads the text in training as it does when it drafts: a token that it lacks is spelled
(`vocabulary.Spelling`), and the law that it learns after each of the target's tokens is the one over the tokens that both have.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Sequence

import torch
from torch import Tensor, nn

from ..errors import ParameterError
from ..models import PACKAGED, get
from ..targets.base import LayerKey, Target
from ..targets.hf_tokenizer import HFTokenizer
from ..train.attention import NAME, Unrolled, unrolling
from ..train.features import Features
from ..train.store import Sample
from ..train.subset import closed_subset, part_of
from ..train.teacher import Teacher, by_frequency, is_whole
from ..train.trainee import Batch, Scores, Trainee, judge
from .vocabulary import Overlap, Spelling, token_bytes


@dataclass(frozen=True)
class ModelTraining:
    """layers: of the target, that the draft model begins with; by default `count` of them, evenly from the first to the last.
    vocabulary: tokens that it has: special ones, single bytes, and the answers' most frequent with all that these are merged from; 0: the
    target's own.
    """

    layers: tuple[int, ...] | None = None
    count: int = 4
    vocabulary: int = 8192

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ParameterError(f"option count must be 1 or more; got {self.count}")


def layers_of(target: Target, options: ModelTraining) -> tuple[LayerKey, ...]:
    """It reads no states of the target."""
    return ()


class ModelTrainee(Trainee):
    """A small causal language model."""

    kind = "draft-model"
    steps = 1

    def __init__(self, teacher: Teacher, options: ModelTraining, features: Features):
        super().__init__()
        self._teacher = (teacher,)  # in a tuple: its modules are not ours
        self.layers = ()
        target, kept = teacher.target, teacher.ids.tolist()
        self.taken = _taken(target, options)
        self.model = _with_layers(target, self.taken)
        self._tokenizer: Any = getattr(target.tokenizer, "_tokenizer", None)
        self._spell: Spelling | None = None
        if len(kept) < target.vocab_size:
            self._tokenizer = part_of(target.tokenizer, kept)
            _keep_tokens(self.model, kept)
            self._spell = _spelling(target, HFTokenizer(self._tokenizer), kept)
        self.to(target.device)

    @classmethod
    def vocabulary(cls, target: Target, samples: Sequence[Sample], options: Any) -> Tensor:
        if is_whole(options.vocabulary, target.vocab_size):
            return torch.arange(target.vocab_size)
        _refuse_others(target)
        order = by_frequency(samples, target.vocab_size)
        return torch.tensor(closed_subset(target.tokenizer, order, options.vocabulary, target.eos))

    def forward(self, batch: Batch) -> Scores:
        """The row before the one whose guess is judged knows the same text as the target's own row."""
        (teacher,) = self._teacher
        tokens, lengths, last = self._read(batch)
        positions = torch.cat([torch.arange(n) for n in lengths]).to(tokens.device)
        with unrolling(Unrolled(lengths)):
            logits = self.model(
                input_ids=tokens[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=last[batch.rows(0) + 1],
            ).logits[0]
        return judge([logits[:, : len(teacher.ids)]], batch, teacher)

    def _read(self, batch: Batch) -> tuple[Tensor, list[int], Tensor]:
        """The batch in its own tokens ``[m]``, how many of each sequence, and for each of the target's tokens the last row ``[n]``."""
        if self._spell is None:
            return batch.tokens, list(batch.lengths), torch.arange(len(batch.tokens), device=batch.tokens.device)
        spelled = [self._spell(token) for token in batch.tokens.tolist()]
        ends = torch.tensor([len(pieces) for pieces in spelled]).cumsum(0)
        parts = torch.tensor([len(pieces) for pieces in spelled]).split(list(batch.lengths))
        tokens = torch.tensor([piece for pieces in spelled for piece in pieces])
        return tokens.to(batch.tokens), [int(part.sum()) for part in parts], (ends - 1).to(batch.tokens.device)

    def write(self, folder: Path) -> None:
        """A folder that transformers loads, in bfloat16."""
        model = copy.deepcopy(self.model).to("cpu", torch.bfloat16)
        model.save_pretrained(folder)
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(folder)
        if self._spell is not None:  # written without spaces it is a third of the size
            (folder / "tokenizer.json").write_text(self._tokenizer.backend_tokenizer.to_str(), encoding="utf-8")

    def facts(self) -> dict[str, Any]:
        (teacher,) = self._teacher
        return {**super().facts(), "layers of the target": list(self.taken), "vocabulary": len(teacher.ids)}


def _taken(target: Target, options: ModelTraining) -> tuple[int, ...]:
    if options.layers is None:
        count = min(options.count, target.n_layers)
        return tuple(round(i * (target.n_layers - 1) / max(count - 1, 1)) for i in range(count))
    if not options.layers or [k for k in options.layers if not 0 <= k < target.n_layers]:
        raise ParameterError(
            f"option layers must name layers of {target.name}, 0 to {target.n_layers - 1}; got {options.layers}"
        )
    return options.layers


def _refuse_others(target: Target) -> None:
    if not hasattr(target, "model"):
        raise ParameterError(f"a draft model begins with layers of the target, and {target.name} is no model of transformers")


def _with_layers(target: Target, taken: tuple[int, ...]) -> Any:
    """The target's model with these layers alone, in float32 and by itself: the target's own may be packed."""
    from transformers import AutoModelForCausalLM

    _refuse_others(target)
    source = str(get(target.name)) if target.name in PACKAGED else target.name
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    decoder = model.get_decoder()
    kept = [decoder.layers[k] for k in taken]
    for place, layer in enumerate(kept):
        layer.self_attn.layer_idx = place
    decoder.layers = nn.ModuleList(kept)
    config = model.config.get_text_config()
    config.num_hidden_layers = len(kept)
    if kinds := getattr(config, "layer_types", None):
        config.layer_types = [kinds[k] for k in taken]
    model.set_attn_implementation(NAME)
    return model.train()


def _keep_tokens(model: Any, kept: Sequence[int]) -> None:
    """Leave these tokens alone in embeddings and output matrix, numbered from 0, and in what configs call the end."""
    rows = torch.tensor(kept)
    ends = [model.get_input_embeddings, model.get_output_embeddings]
    values = [{name: t.detach()[rows].clone() for name, t in end().named_parameters()} for end in ends]
    model.resize_token_embeddings(len(kept), mean_resizing=False)
    with torch.no_grad():
        for end, own in zip(ends, values):
            for name, parameter in end().named_parameters():
                parameter.copy_(own[name])
    model.get_input_embeddings().padding_idx = None  # that number is another token's now
    number = {token: i for i, token in enumerate(kept)}
    for config in (model.config, model.config.get_text_config(), model.generation_config):
        for name in [name for name in vars(config) if name.endswith("_token_id")]:
            value = getattr(config, name)
            left = [number[i] for i in (value if isinstance(value, list) else [value]) if i in number]
            setattr(config, name, left if isinstance(value, list) else left[0] if left else None)


def _spelling(target: Target, own: HFTokenizer, kept: Sequence[int]) -> Spelling:
    """As the drafter will have it."""
    assert target.tokenizer is not None
    overlap = Overlap(token_bytes(target.tokenizer), token_bytes(own))
    end = min((i for i, token in enumerate(kept) if token in target.eos), default=0)
    return Spelling(overlap, target.vocab_size, len(kept), end)
