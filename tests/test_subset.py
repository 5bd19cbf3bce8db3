"""A part of a vocabulary: closed under merges, a tokenizer of its own, and a draft model that reads and writes with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_data import QUESTIONS, made
from tiny import SPECIAL, TEXT, tiny_folder, tiny_tokenizer
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import outrider
from outrider.drafters import load_drafter, model_training
from outrider.drafters.model import ModelDrafter
from outrider.drafters.model_training import ModelTrainee, ModelTraining
from outrider.drafters.vocabulary import Translated
from outrider.errors import ParameterError
from outrider.models import load_target
from outrider.targets.hf_tokenizer import HFTokenizer
from outrider.train.loop import Plan, Run, Settings
from outrider.train.store import Store
from outrider.train.subset import closed_subset, part_of
from outrider.train.teacher import by_frequency
from outrider.tree import DraftTree

MODEL = str(tiny_folder(eos=0))


def letters(merges: list[tuple[str, str]], **model: Any) -> HFTokenizer:
    vocab = {text: i for i, text in enumerate([*"abcd", *dict.fromkeys(a + b for a, b in merges)])}
    return HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab=vocab, merges=merges, **model))))


# ---- tokenizers ------------------------------------------------------------------------------------------------------------


def test_what_a_token_is_merged_from_is_kept_with_it() -> None:
    """As the tokenizer merges it, where there are two ways. What does not fit with all its parts is passed over for what does."""
    tokenizer = letters([("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc"), ("abc", "d"), ("c", "d")])
    assert tokenizer.vocabulary() == {"a": 0, "b": 1, "c": 2, "d": 3, "ab": 4, "bc": 5, "abc": 6, "abcd": 7, "cd": 8}
    assert closed_subset(tokenizer, [6], 8) == [0, 1, 2, 3, 4, 6]
    assert closed_subset(tokenizer, [7, 8], 7) == [0, 1, 2, 3, 4, 6, 7]
    assert closed_subset(tokenizer, [7, 8], 6) == [0, 1, 2, 3, 8]
    assert closed_subset(tokenizer, [7, 8, 5], 6) == [0, 1, 2, 3, 5, 8]
    assert closed_subset(tokenizer, [7], 5, needed=[8]) == [0, 1, 2, 3, 8]
    part = part_of(tokenizer, [0, 1, 2, 3, 4, 6])
    assert part.get_vocab() == {"a": 0, "b": 1, "c": 2, "d": 3, "ab": 4, "abc": 5}
    assert part("abcdbc")["input_ids"] == [5, 3, 1, 2]


@pytest.mark.parametrize("size", [260, 270, 285])
def test_each_kept_token_can_be_reached_and_any_text_be_spelled(size: int, tmp_path: Any) -> None:
    whole = HFTokenizer(tiny_tokenizer())
    longest = sorted(whole.vocabulary().values(), reverse=True)
    kept = closed_subset(whole, longest, size)
    assert len(kept) == size and kept[: len(SPECIAL)] == list(range(len(SPECIAL)))
    part_of(whole, kept).save_pretrained(tmp_path)
    own = HFTokenizer(AutoTokenizer.from_pretrained(tmp_path))
    names = {i: text for text, i in whole.vocabulary().items()}
    assert own.vocabulary() == {names[token]: i for i, token in enumerate(kept)} and own.size == size
    backend = own._tokenizer.backend_tokenizer.model
    assert all(
        [piece.id for piece in backend.tokenize(text)] == [i] for text, i in own.vocabulary().items() if i not in own.special
    )
    for text in (*TEXT, "日本 €\n\tx"):
        assert own.decode(own.encode(text)) == text
    messages = [{"role": "user", "content": "The bridge"}]
    assert own.render(messages) == whole.render(messages)
    assert own.chat(messages)[0] == SPECIAL.index("<user>") and own._tokenizer.eos_token_id == 0


def test_special_tokens_that_a_tokenizer_adds_are_renumbered() -> None:
    from tokenizers.processors import TemplateProcessing

    inner = Tokenizer(models.BPE(vocab={"x": 0, "y": 1, "a": 2, "b": 3, "ab": 4}, merges=[("a", "b")]))
    inner.add_special_tokens(["<s>"])
    inner.add_tokens(["<think>", "<rare>"])
    inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 5)])
    whole = HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>"))
    kept = closed_subset(whole, [6, 4, 7], 6)
    assert kept == [0, 1, 2, 3, 5, 6]
    part = HFTokenizer(part_of(whole, kept))
    assert part.encode("ab<think>y") == [4, 2, 3, 5, 1] and part.special == {4}


def test_tokenizers_that_no_part_can_be_taken_of() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    for tokenizer in (None, HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=words)), letters([], end_of_word_suffix="@")):
        with pytest.raises(ParameterError, match=r"byte-pair encoding alone.*vocabulary=0"):
            closed_subset(tokenizer, [], 2)
    with pytest.raises(ParameterError, match="vocabulary must be 260 or more"):
        closed_subset(HFTokenizer(tiny_tokenizer()), [], 259)


# ---- a draft model ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target() -> Any:
    return load_target(MODEL)


@pytest.fixture(scope="module")
def data(target: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("data")
    made(target, folder, max_tokens=24)
    return folder


def new_run(target: Any, data: Any, folder: Any, **settings: Any) -> Run:
    plan = Plan(steps=3, batch=2, precision="float32", held_out=1, log=1, evaluate=0, save=0, lr=3e-3)
    options = ModelTraining(count=1, vocabulary=275)
    return Run(target, Store(data), Settings("draft-model", options, plan, cache=False, **settings), folder)


def test_it_is_a_model_of_its_own(target: Any, data: Any, tmp_path: Any) -> None:
    run = new_run(target, data, tmp_path)
    kept = run.teacher.ids.tolist()
    order = by_frequency([run.samples[i] for i in run.train_on], target.vocab_size)
    assert len(kept) == 275 and set(order[:8]) <= set(kept)
    trainee = run.trainee
    assert isinstance(trainee, ModelTrainee)
    rows = target.model.get_input_embeddings().weight[kept].float()
    assert torch.equal(trainee.model.get_input_embeddings().weight, rows)
    run.go()
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16 and model.config.vocab_size == len(tokenizer) == 275
    assert model.get_input_embeddings().weight.shape == model.get_output_embeddings().weight.shape == (275, 32)
    assert model.config.eos_token_id == tokenizer.eos_token_id == kept.index(0)
    assert torch.isfinite(model(**tokenizer("The bridge", return_tensors="pt")).logits).all()


def test_it_learns_at_the_rows_that_it_drafts_from(target: Any, data: Any, tmp_path: Any, monkeypatch: Any) -> None:
    """What training takes the loss on equals what the drafter says after the same text, spelled tokens and all."""
    run = new_run(target, data, tmp_path)
    trainee = run.trainee
    assert isinstance(trainee, ModelTrainee)
    with torch.no_grad():
        for parameter in trainee.parameters():
            parameter.copy_(parameter.bfloat16().float())
    run.save()
    drafter = load_drafter(str(tmp_path), target, dtype="float32")
    assert isinstance(drafter, ModelDrafter) and isinstance(drafter.model, Translated)
    batch = run.features.batch([0, 1])
    assert any(int(token) not in run.teacher.ids for token in batch.tokens[: batch.prompts[0]])
    seen: list[torch.Tensor] = []
    judge = model_training.judge
    monkeypatch.setattr(model_training, "judge", lambda logits, *rest: seen.extend(logits) or judge(logits, *rest))
    with torch.no_grad():
        trainee(batch)
    learnt = iter(seen[0])
    for sample in (run.samples[0], run.samples[1]):
        tokens = list(map(int, sample.tokens))
        slot = drafter.model.open()
        first = sample.prompt - 1
        for _ in drafter.model.prefill(slot, tokens[:first]):
            pass
        (output,) = drafter.model.forward([(slot, DraftTree.chain(tokens[first], tokens[first + 1 : -1]))])
        assert output.logits is not None
        for logits in output.logits[:, run.teacher.ids]:
            assert torch.allclose(logits, next(learnt), atol=1e-4)
    assert next(learnt, None) is None


def test_its_text_is_the_targets(target: Any, data: Any, tmp_path: Any) -> None:
    new_run(target, data, tmp_path).go()
    plain = outrider.load(target, None)
    drafted = outrider.load(target, load_drafter(str(tmp_path), target, {"min_probability": 0.0}), draft=4)
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        for values in ({}, {"temperature": 1.0, "seed": 5}):
            one, other = (engine.generate(messages, max_tokens=40, **values) for engine in (plain, drafted))
            assert one.tokens == other.tokens
            assert other.stats.proposed > 0


def test_another_runs_weights_keep_their_tokens(target: Any, data: Any, tmp_path: Any) -> None:
    """Begun with the weights of a run on other text, a row of the matrices is for the token that it was learnt for; going on, too."""
    prompts = [target.tokenizer.chat([{"role": "user", "content": "Zebras buzz, quizzically?"}])]
    other = tmp_path / "other"
    made(target, other, prompts=prompts, max_tokens=60)
    first = new_run(target, data, tmp_path / "first")
    first.go()
    second = new_run(target, other, tmp_path / "second", start=tmp_path / "first")
    assert not torch.equal(second.counted, second.teacher.ids), "the texts are too alike for this test"
    assert torch.equal(second.teacher.ids, first.teacher.ids)
    one, two = (run.trainee.state_dict() for run in (first, second))
    assert all(torch.equal(one[name], two[name]) for name in one)
    second.go()
    again = new_run(target, other, tmp_path / "second", start=tmp_path / "first")
    assert again.step == 3 and torch.equal(again.teacher.ids, first.teacher.ids)
    with pytest.raises(ParameterError, match="not the data that this run began with"):
        new_run(target, data, tmp_path / "second")
