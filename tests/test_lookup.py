"""Prompt lookup against a scan of the whole text."""

import random

import pytest

from outrider.decode import Sequence, decode
from outrider.drafters import make_options
from outrider.drafters.base import Ask
from outrider.drafters.lookup import LookupDrafter, LookupOptions
from outrider.errors import ParameterError
from outrider.sampling import Sampler, SamplingParams
from outrider.targets.table import TableTarget
from outrider.tree import Budget


def sampler(prompt=(0,)):
    return Sampler(SamplingParams(), prompt, 100)


def draft(drafter, state, tokens, nodes=8, depth=8):
    (tree,) = drafter.propose([Ask(state, tokens, Budget(nodes, depth))])
    assert tree.tokens[0] == tokens[-1] and tree.is_chain and tree.q is None
    return list(tree.tokens[1:])


def scan(tokens, options, length):
    """What lookup should draft, by trying every n-gram at every place."""
    for n in range(options.max_ngram, options.min_ngram - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:] and n <= len(tokens):
                text = list(tokens)
                for at in range(end, end + length):
                    text.append(text[at])
                return text[len(tokens) :]
    return []


@pytest.mark.parametrize("alphabet", [1, 2, 4, 20])
@pytest.mark.parametrize("sizes", [(3, 1), (4, 2), (1, 1)])
def test_equals_a_scan_of_the_text(alphabet, sizes):
    rng = random.Random(alphabet)
    options = LookupOptions(*sizes)
    drafter = LookupDrafter(options)
    tokens = [rng.randrange(alphabet)]
    state = drafter.open(sampler(tokens))
    for _ in range(80):
        assert draft(drafter, state, tokens, nodes=5) == scan(tokens, options, 5)
        tokens += [rng.randrange(alphabet) for _ in range(rng.randint(1, 3))]


def test_longest_ngram_wins_then_the_latest():
    drafter = LookupDrafter()
    assert draft(drafter, drafter.open(sampler()), [1, 2, 7, 2, 8, 1, 2], nodes=2) == [7, 2]
    assert draft(drafter, drafter.open(sampler()), [2, 7, 2, 8, 2], nodes=2) == [8, 2]


def test_a_copy_runs_on_into_itself():
    drafter = LookupDrafter()
    assert draft(drafter, drafter.open(sampler()), [5, 6, 5, 6], nodes=7) == [5, 6, 5, 6, 5, 6, 5]


def test_keeps_to_the_budget_and_the_options():
    drafter = LookupDrafter(LookupOptions(max_length=3))
    tokens = [1, 2, 3, 4, 5, 6, 1]
    assert draft(drafter, drafter.open(sampler()), tokens) == [2, 3, 4]
    assert draft(drafter, drafter.open(sampler()), tokens, nodes=2) == [2, 3]
    assert draft(drafter, drafter.open(sampler()), tokens, depth=1) == [2]
    assert draft(drafter, drafter.open(sampler()), tokens, nodes=0) == []
    assert draft(drafter, drafter.open(sampler()), [1, 2, 3]) == []
    assert draft(LookupDrafter(LookupOptions(min_ngram=2)), drafter.open(sampler()), [1, 2, 3]) == []


def test_after_truncate_it_knows_only_what_is_left():
    rng = random.Random(7)
    drafter = LookupDrafter()
    tokens = [rng.randrange(3) for _ in range(30)]
    state = drafter.open(sampler())
    for _ in range(60):
        if rng.random() < 0.3:
            keep = rng.randint(1, len(tokens))
            state.truncate(keep)
            if rng.random() < 0.5:
                tokens = tokens[:keep]
            else:
                del tokens[keep:]
        tokens += [rng.randrange(3) for _ in range(rng.randint(0, 3))]
        fresh = drafter.open(sampler())
        assert draft(drafter, state, tokens) == draft(drafter, fresh, list(tokens))


def test_a_fork_and_other_sequences_keep_their_own_index():
    drafter = LookupDrafter(LookupOptions(max_ngram=2))
    one, other = drafter.open(sampler()), drafter.open(sampler())
    trees = drafter.propose([Ask(one, [1, 2, 1], Budget(1, 1)), Ask(other, [1, 3, 1], Budget(1, 1))])
    assert [tree.tokens[1:] for tree in trees] == [(2,), (3,)]
    assert draft(drafter, one.fork(sampler()), [1, 4, 1], nodes=1) == [4]


def test_the_index_grows_linearly():
    options = LookupOptions()
    for alphabet in (1, 3, 1000):
        rng = random.Random(0)
        state = LookupDrafter(options).open(sampler())
        state.catch_up([rng.randrange(alphabet) for _ in range(2000)])
        assert len(state._place) <= 2000 * options.max_ngram


@pytest.mark.parametrize(
    "values, named",
    [
        ({"max_ngram": 0}, "max_ngram"),
        ({"min_ngram": 9}, "min_ngram"),
        ({"max_length": 0}, "max_length"),
        ({"max_ngram": 99}, "max_ngram"),
    ],
)
def test_bad_options_are_named(values, named):
    with pytest.raises(ParameterError, match=named):
        LookupOptions(**values)
    with pytest.raises(ParameterError, match=named):
        make_options(LookupOptions, {name: str(value) for name, value in values.items()}, "lookup")


@pytest.mark.parametrize(
    "params, rule", [(SamplingParams(max_tokens=60), "block"), (SamplingParams(1.0, seed=3, max_tokens=60), "coupled")]
)
def test_output_equals_plain_decoding(params, rule):
    target = TableTarget(vocab_size=6, order=1, sharpness=3.0, eos=())
    prompts = [[1, 2, 3], [4, 5], [2]]

    def run(drafter):
        sequences = [Sequence(target, prompt, params, rule) for prompt in prompts]
        rounds = list(decode(target, drafter, sequences))
        return [s.output for s in sequences], rounds

    from outrider.drafters import NoDrafter

    plain, _ = run(NoDrafter())
    output, rounds = run(LookupDrafter())
    assert output == plain
    assert sum(r.accepted for r in rounds) > 0
