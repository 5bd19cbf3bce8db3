"""The suffix automaton and the drafter above it, against brute force over the whole text."""

import random

import pytest

from outrider.decode import Sequence, decode
from outrider.drafters import NoDrafter, automaton, suffix
from outrider.drafters.automaton import Automaton
from outrider.drafters.base import Ask
from outrider.drafters.suffix import SuffixDrafter, SuffixOptions
from outrider.errors import ParameterError
from outrider.sampling import Sampler, SamplingParams
from outrider.targets.table import LetterTokenizer, TableTarget
from outrider.tree import Budget

TEXTS = {
    "one token": lambda n: [0] * n,
    "two tokens": lambda n: random.Random(1).choices(range(2), k=n),
    "period 7": lambda n: [i % 7 for i in range(n)],
    "blocks": lambda n: [int(i % 50 > 48) for i in range(n)],
    "random": lambda n: random.Random(2).choices(range(1000), k=n),
    "fibonacci": lambda n: fibonacci(n),
}


def fibonacci(n):
    before, word = [0], [0, 1]
    while len(word) < n:
        before, word = word, word + before
    return word[:n]


def places(text, part):
    """The ends of every occurrence of `part` in `text`."""
    return [end for end in range(len(part), len(text) + 1) if text[end - len(part) : end] == part]


def built(text):
    made = Automaton()
    for token in text:
        made.append(token)
    return made


def sampler(prompt=(0,), prediction=None, tokenizer=None):
    return Sampler(SamplingParams(prediction=prediction), prompt, 5000, tokenizer=tokenizer)


def draft(drafter, state, tokens, nodes=8, depth=8, price=0.0):
    (tree,) = drafter.propose([Ask(state, tokens, Budget(nodes, depth, price))])
    assert tree.tokens[0] == tokens[-1] and tree.q is None
    assert len(tree) <= nodes + 1 and tree.depth <= depth
    assert tree.score is not None and all(0 <= chance <= 1 for chance in tree.score)
    return tree


# ---- the automaton ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEXTS)
def test_states_are_what_they_should_be(name, monkeypatch):
    monkeypatch.setattr(automaton, "WALK", 10**9)  # counts are exact then
    text = TEXTS[name](45)
    made = built(text)
    for start in range(len(text)):
        state = 0
        for end in range(start + 1, len(text) + 1):
            state = made.after[state][text[end - 1]]
            part = text[start:end]
            ends = places(text, part)
            assert made.count[state] == len(ends)
            assert made.length[made.link[state]] < len(part) <= made.length[state]
            if len(part) == made.length[state]:
                assert list(made.after[state]) == latest_last([text[e] for e in ends if e < len(text)])


def latest_last(tokens):
    return list(reversed(dict.fromkeys(reversed(tokens))))


@pytest.mark.parametrize("name", TEXTS)
def test_longest_repeated_suffix_at_every_length(name):
    text = TEXTS[name](60)
    made = Automaton()
    for n, token in enumerate(text, 1):
        made.append(token)
        longest = max(m for m in range(n) if m == 0 or len(places(text[:n], text[n - m : n])) > 1)
        assert made.length[made.repeated] == longest


@pytest.mark.parametrize("name", TEXTS)
def test_bounded_counts_are_exact_for_the_longest_contexts(name):
    text = TEXTS[name](400)
    made, exact = built(text), None
    state, exact_contexts = made.repeated, 0
    while state > 0 and exact_contexts < 3:
        part = text[len(text) - made.length[state] :]
        exact = len(places(text, part))
        assert 1 <= made.count[state] <= exact
        if name in ("random", "two tokens"):  # ordinary repetition stays within the bound
            assert made.count[state] == exact
        state, exact_contexts = made.link[state], exact_contexts + 1


class Counted(list):
    """A list that counts how often it is read."""

    reads = 0

    def __getitem__(self, index):
        Counted.reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("name", TEXTS)
def test_size_and_work_grow_linearly(name):
    work = []
    for n in (1000, 2000, 4000):
        made = Automaton()
        made.link, made.length, made.after = Counted(made.link), Counted(made.length), Counted(made.after)
        Counted.reads = 0
        for token in TEXTS[name](n):
            made.append(token)
        work.append(Counted.reads)
        assert len(made.length) <= 2 * n
        assert sum(map(len, list.__iter__(made.after))) <= 3 * n
    assert work[1] < 2.3 * work[0] and work[2] < 2.3 * work[1]
    assert work[2] < 150 * 4000


# ---- the drafter ------------------------------------------------------------------------------------------------


def expected_first(text):
    """The most frequent continuation of the longest suffix that occurs earlier; of equals, the latest."""
    for m in range(len(text) - 1, 0, -1):
        followers = [text[end] for end in places(text, text[-m:]) if end < len(text)]
        if followers:
            latest = {token: at for at, token in enumerate(followers)}
            return max(latest, key=lambda token: (followers.count(token), latest[token]))
    return None


@pytest.mark.parametrize("name", TEXTS)
def test_first_token_equals_brute_force(name, monkeypatch):
    monkeypatch.setattr(automaton, "WALK", 10**9)
    text = TEXTS[name](70)
    drafter = SuffixDrafter(SuffixOptions(min_probability=0))
    state, tokens = drafter.open(sampler()), []
    for token in text:
        tokens.append(token)
        tree = draft(drafter, state, tokens, nodes=1)
        assert (tree.tokens[1] if len(tree) > 1 else None) == expected_first(tokens)


def test_follows_a_repetition_as_far_as_the_budget_goes():
    drafter = SuffixDrafter(SuffixOptions(min_probability=0))
    text = [1, 2, 3] * 20
    assert draft(drafter, drafter.open(sampler()), text, nodes=7).tokens[1:] == (1, 2, 3, 1, 2, 3, 1)
    assert draft(drafter, drafter.open(sampler()), text, depth=2).tokens[1:] == (1, 2)
    assert draft(drafter, drafter.open(sampler()), text, nodes=0).tokens == (3,)
    same = draft(drafter, drafter.open(sampler()), [9] * 50, nodes=40, depth=40)
    assert same.tokens == (9,) * 41


def test_nothing_is_drafted_where_nothing_repeats():
    drafter = SuffixDrafter()
    assert len(draft(drafter, drafter.open(sampler()), [1])) == 1
    assert len(draft(drafter, drafter.open(sampler()), [1, 2, 3, 4])) == 1


def test_chances_leave_room_for_the_unseen():
    drafter = SuffixDrafter(SuffixOptions(min_probability=0))
    prompt = [1, 2, 3, 1, 2]
    tree = draft(drafter, drafter.open(sampler(prompt)), prompt)
    assert tree.tokens[1:3] == (3, 1)
    assert tree.score[1] == pytest.approx(1 / (1 + suffix.NOVELTY[2]))
    assert tree.score[2] == pytest.approx(1 / (1 + suffix.NOVELTY[3]))
    prompt = [1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2]  # after 1 2: twice 3, once 4
    tree = draft(drafter, drafter.open(sampler(prompt)), prompt, nodes=1)
    assert tree.tokens[1] == 3
    assert tree.score[1] == pytest.approx(2 / (3 + 1 + suffix.NOVELTY[2]))


def test_longer_context_is_trusted_more():
    drafter = SuffixDrafter(SuffixOptions(min_probability=0))
    chances = []
    for m in (1, 2, 4, 8, 30, 100):
        prompt = [*range(10, 10 + m), 7, *range(10, 10 + m)]
        chances.append(draft(drafter, drafter.open(sampler(prompt)), prompt, nodes=1).score[1])
    assert chances == sorted(chances) and chances[0] < 0.5 < 0.95 < chances[-1]


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_stops_at_the_price_and_at_the_least_probability(shape):
    rng = random.Random(5)
    for _ in range(30):
        prompt = rng.choices(range(4), k=60)
        for least, price in ((0.0, 0.4), (0.4, 0.0), (0.3, 0.4)):
            drafter = SuffixDrafter(SuffixOptions(shape=shape, min_probability=least))
            tree = draft(drafter, drafter.open(sampler(prompt)), prompt, nodes=50, depth=50, price=price)
            every = SuffixDrafter(SuffixOptions(shape=shape, min_probability=0.05))
            whole = draft(every, every.open(sampler(prompt)), prompt, nodes=50, depth=50)
            assert all(probability(tree, node) >= 0.4 for node in range(len(tree)))
            assert len(tree) == sum(probability(whole, node) >= 0.4 for node in range(len(whole)))


def probability(tree, node):
    product = 1.0
    for above in tree.path(node):
        product *= tree.score[above]
    return product


def test_tree_holds_the_chain_and_the_likely_alternatives():
    prompt = [1, 2, 3, 1, 2, 4, 9, 2]
    chain_drafter, tree_drafter = (SuffixDrafter(SuffixOptions(shape=shape, min_probability=0)) for shape in ("chain", "tree"))
    chain = draft(chain_drafter, chain_drafter.open(sampler(prompt)), prompt, nodes=1)
    tree = draft(tree_drafter, tree_drafter.open(sampler(prompt)), prompt, nodes=30, depth=2)
    first = [tree.tokens[node] for node in tree.children[0]]
    assert first == [4, 3] and chain.tokens[1] == 4
    for node in range(len(tree)):
        tokens = [tree.tokens[child] for child in tree.children[node]]
        assert len(set(tokens)) == len(tokens)
        assert sum(tree.score[child] for child in tree.children[node]) <= 1 + 1e-9
    order = [probability(tree, node) for node in range(len(tree))]
    assert order == sorted(order, reverse=True)


def test_min_match_and_max_length():
    drafter = SuffixDrafter(SuffixOptions(min_match=2, min_probability=0, max_length=2))
    assert len(draft(drafter, drafter.open(sampler()), [1, 2, 3, 1])) == 1
    assert draft(drafter, drafter.open(sampler()), [1, 2, 3, 1, 2]).tokens[1:] == (3, 1)


def test_surprises_lower_the_chances_of_their_own_sequence_only():
    drafter = SuffixDrafter(SuffixOptions(min_probability=0))
    prompt = [1, 2, 3, 4, 5, 1, 6, 2, 7, 3, 8, 4, 9, 5]

    def chance(state, tokens):
        return draft(drafter, state, tokens, nodes=1).score[1]

    before = chance(drafter.open(sampler(prompt)), [*prompt, 1])
    tokens = list(prompt)
    state = drafter.open(sampler(prompt))
    for i in range(60):
        draft(drafter, state, tokens)
        tokens += [1 + i % 5, 100 + i]  # a token that is known, then one that nothing could foretell
    surprised = chance(state, [*tokens, 1])
    indexed = drafter.open(sampler(tokens))  # the same text, but as a prompt: nothing is learnt from it
    assert surprised < 0.6 * chance(indexed, [*tokens, 1])
    assert chance(drafter.open(sampler(prompt)), [*prompt, 1]) == before


def test_after_truncate_it_knows_only_what_is_left():
    rng = random.Random(7)
    drafter = SuffixDrafter(SuffixOptions(shape="tree", min_probability=0.01))
    tokens = rng.choices(range(3), k=30)
    prompt = list(tokens[:10])
    state = drafter.open(sampler(prompt))
    for _ in range(60):
        if rng.random() < 0.3:
            keep = rng.randint(1, len(tokens))
            state.truncate(keep)
            if rng.random() < 0.5:
                tokens = tokens[:keep]
            else:
                del tokens[keep:]
        tokens += rng.choices(range(3), k=rng.randint(0, 3))
        seen, fresh = draft(drafter, state, tokens), draft(drafter, drafter.open(sampler(prompt)), list(tokens))
        assert (seen.tokens, seen.parents, seen.score) == (fresh.tokens, fresh.parents, fresh.score)


def test_several_states_and_forks_are_as_if_alone():
    rng = random.Random(3)
    drafter = SuffixDrafter(SuffixOptions(min_probability=0))
    texts = [rng.choices(range(4), k=40) for _ in range(4)]
    states = [drafter.open(sampler(text[:20])) for text in texts]
    for n in (20, 25, 40):
        together = drafter.propose([Ask(s, text[:n], Budget(6, 6)) for s, text in zip(states, texts)])
        for tree, text in zip(together, texts):
            alone = draft(drafter, drafter.open(sampler(text[:20])), text[:n], nodes=6)
            assert (tree.tokens, tree.score) == (alone.tokens, alone.score)
    forked = states[0].fork(sampler(texts[0][:20]))
    assert draft(drafter, forked, texts[0]).tokens == draft(drafter, states[0], texts[0]).tokens


def test_drafts_from_the_prediction_but_never_across_its_border():
    tokenizer = LetterTokenizer("abcdefgh")
    drafter = SuffixDrafter(SuffixOptions(min_probability=0))
    state = drafter.open(sampler([7], prediction="abcde", tokenizer=tokenizer))
    assert draft(drafter, state, [7, 0, 1], nodes=3).tokens[1:] == (2, 3, 4)
    assert len(draft(drafter, state, [7, 0, 1, 2, 3, 4])) == 1  # the prediction ends: what came next is another text
    assert state.automaton.length[state.automaton.repeated] == 5
    draft(drafter, state, [4, 7, 4, 7])
    assert state.automaton.length[state.automaton.repeated] == 2
    state.truncate(0)
    assert draft(drafter, state, [6, 0, 1], nodes=1).tokens[1:] == (2,)  # still there after starting over
    with pytest.raises(ParameterError, match="tokenizer"):
        drafter.open(sampler([7], prediction="abcde"))


def test_a_new_turn_brings_its_own_prediction():
    tokenizer = LetterTokenizer("abcdefgh")
    drafter = SuffixDrafter(SuffixOptions(min_probability=0))
    state = drafter.open(sampler([7], prediction="abc", tokenizer=tokenizer))
    assert draft(drafter, state, [7, 0], nodes=1).tokens[1:] == (1,)
    state.sampler = sampler([7, 0], prediction="adc", tokenizer=tokenizer)
    assert draft(drafter, state, [7, 0], nodes=1).tokens[1:] == (3,)


@pytest.mark.parametrize(
    "values, named",
    [
        ({"shape": "bush"}, "shape"),
        ({"min_probability": 1.5}, "min_probability"),
        ({"max_length": 0}, "max_length"),
        ({"min_match": 0}, "min_match"),
    ],
)
def test_bad_options_are_named(values, named):
    with pytest.raises(ParameterError, match=named):
        SuffixOptions(**values)


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("temperature, rule", [(0.0, "rejection"), (1.0, "coupled")])
def test_output_equals_plain_decoding(shape, temperature, rule):
    target = TableTarget(vocab_size=6, order=1, sharpness=3.0, eos=())
    params = SamplingParams(temperature, seed=3, max_tokens=60)

    def run(drafter):
        sequences = [Sequence(target, prompt, params, rule) for prompt in ([1, 2, 3], [4, 5], [2])]
        rounds = list(decode(target, drafter, sequences))
        return [s.output for s in sequences], rounds

    plain, _ = run(NoDrafter())
    output, rounds = run(SuffixDrafter(SuffixOptions(shape=shape)))
    assert output == plain
    assert sum(r.accepted for r in rounds) > 0
