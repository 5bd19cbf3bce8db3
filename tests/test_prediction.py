"""Following an expected text: word by word, through every kind of difference."""

import random

import pytest

from outrider.decode import Sequence, decode
from outrider.drafters import NoDrafter, make_options
from outrider.drafters.base import Ask
from outrider.drafters.prediction import LOST, PredictionDrafter, PredictionOptions
from outrider.errors import ParameterError
from outrider.sampling import Sampler, SamplingParams
from outrider.targets.table import TableTarget
from outrider.tree import Budget

PROMPT = [900, 901, 902]
EXPECTED = list(range(100, 140))


class Numbers:
    """A tokenizer whose texts are numbers."""

    def encode_plain(self, text):
        return [int(word) for word in text.split()]


def as_text(tokens):
    return " ".join(map(str, tokens))


def sampler(expected=EXPECTED, prompt=PROMPT, tokenizer=Numbers()):
    params = SamplingParams(prediction=None if expected is None else as_text(expected))
    return Sampler(params, prompt, 1000, tokenizer=tokenizer)


def drafted(state, output, nodes=4, depth=99, price=0.0, least=0.0):
    drafter = PredictionDrafter(PredictionOptions(min_probability=least))
    tokens = [*PROMPT, *output]
    (tree,) = drafter.propose([Ask(state, tokens, Budget(nodes, depth, price))])
    assert tree.tokens[0] == tokens[-1] and tree.is_chain and tree.q is None and len(tree.score) == len(tree)
    return list(tree.tokens[1:])


def after(output, expected=EXPECTED, **budget):
    """The draft after `output`, which came token by token."""
    state = PredictionDrafter().open(sampler(expected))
    for n in range(len(output)):
        drafted(state, output[:n])
    together = drafted(PredictionDrafter().open(sampler(expected)), output, **budget)
    assert together == drafted(state, output, **budget)  # however many tokens came in a round
    return together


def test_starts_at_the_beginning_and_moves_on():
    assert after([]) == [100, 101, 102, 103]
    assert after([100]) == [101, 102, 103, 104]
    assert after(EXPECTED[:38]) == [138, 139]
    assert after(EXPECTED) == []
    assert after([*EXPECTED, 5, 6]) == []


def test_a_replaced_token_is_stepped_over_at_once():
    assert after([100, 101, 7]) == [103, 104, 105, 106]
    assert after([100, 101, 7, 103]) == [104, 105, 106, 107]
    assert after([100, 101, 7, 8]) == [104, 105, 106, 107]


def test_an_insertion_is_found_after_one_more_token():
    assert after([100, 101, 7, 8, 9, 102]) == [103, 104, 105, 106]


def test_a_deletion_is_found_at_once():
    assert after([100, 101, 110]) == [111, 112, 113, 114]


def test_a_preface_and_a_different_first_token():
    assert after([7, 8, 9, 7, 100]) == [101, 102, 103, 104]
    assert after([7, 101]) == [102, 103, 104, 105]


def test_the_nearest_place_after_the_last_sure_one_wins():
    expected = [1, 2, 3, 50, 4, 5, 6, 50, 7, 8, 50, 9]
    assert after([1, 2, 3, 4, 5, 50], expected, nodes=1) == [7]
    assert after([4, 5, 6, 9, 50], expected, nodes=1) == [7]


def test_a_longer_run_goes_before_a_nearer_one_and_may_lie_behind():
    expected = [1, 2, 3, 4, 5, 6, 7, 3, 9, 8]
    assert after([1, 2, 3, 4, 5, 6, 7, 3, 9, 2, 3], expected, nodes=1) == [4]


def test_one_wrong_jump_does_not_lose_the_place():
    expected = [*range(10, 20), 99, *range(20, 30)]
    assert after([10, 11, 12, 99], expected, nodes=1) == [20]  # taken for a deletion
    assert after([10, 11, 12, 99, 13], expected, nodes=1) == [14]  # it was an insertion


def test_drafts_nothing_while_lost_and_comes_back():
    strange = [7] * (LOST + 1)
    assert after([100, 101, *strange[:-1]]) != []
    assert after([100, 101, *strange]) == []
    assert after([100, 101, *strange, 120]) == []
    assert after([100, 101, *strange, 120, 121]) == [122, 123, 124, 125]


@pytest.mark.parametrize("seed", range(8))
def test_through_random_differences_most_is_drafted(seed):
    rng = random.Random(seed)
    expected = [rng.randrange(100, 160) for _ in range(300)]
    output, at = [], 0
    while at < len(expected):
        if rng.random() < 0.05:
            output += [rng.randrange(60) for _ in range(rng.randint(0, 3))]
            at += rng.randint(0, 3)
        output.append(expected[min(at, 299)])
        at += 1
    state, emitted, rounds = PredictionDrafter().open(sampler(expected)), 0, 0
    while emitted < len(output):
        draft = drafted(state, output[:emitted], nodes=8)
        kept = next((i for i, token in enumerate(draft) if output[emitted + i : emitted + i + 1] != [token]), len(draft))
        emitted, rounds = emitted + kept + 1, rounds + 1
    assert len(output) / rounds > 4


def test_keeps_to_the_budget_and_the_price():
    state = PredictionDrafter().open(sampler())
    assert drafted(state, [], nodes=0) == []
    assert drafted(state, [], nodes=9, depth=2) == [100, 101]
    assert drafted(state, [100, 101], nodes=30, price=0.99) == []
    few = drafted(state, [100, 101], nodes=30, price=0.4)
    assert 1 <= len(few) < 30 and few == drafted(state, [100, 101], nodes=30, least=0.4)
    assert len(drafted(state, EXPECTED[:20], nodes=30, price=0.4)) > len(few)  # long agreement is trusted
    drafter = PredictionDrafter(PredictionOptions(max_length=3))
    (tree,) = drafter.propose([Ask(drafter.open(sampler()), PROMPT, Budget(9, 9))])
    assert len(tree) == 4


def test_after_truncate_it_stands_where_the_tokens_say():
    rng = random.Random(4)
    expected = [rng.randrange(100, 110) for _ in range(60)]
    state = PredictionDrafter().open(sampler(expected))
    output = list(expected[:20])
    for _ in range(40):
        keep = rng.randint(0, len(output))
        state.truncate(len(PROMPT) + keep)
        output = [*output[:keep], *rng.choices(range(99, 110), k=rng.randint(0, 4))]
        output += expected[len(output) : len(output) + rng.randint(0, 4)]
        assert drafted(state, output) == drafted(PredictionDrafter().open(sampler(expected)), output)


def test_sequences_forks_and_turns_have_their_own_prediction():
    drafter = PredictionDrafter()
    one, other = drafter.open(sampler([1, 2])), drafter.open(sampler([3, 4]))
    trees = drafter.propose([Ask(one, PROMPT, Budget(1, 1)), Ask(other, PROMPT, Budget(1, 1))])
    assert [tree.tokens[1:] for tree in trees] == [(1,), (3,)]
    assert drafted(one.fork(sampler([5, 6])), []) == [5, 6]
    one.sampler = sampler([7, 8])
    assert drafted(one, []) == [7, 8]


def test_the_text_may_come_from_the_options(tmp_path):
    path = tmp_path / "expected.txt"
    path.write_text("4 5 6", encoding="utf-8")
    for values in ({"text": "4 5 6"}, {"file": str(path)}):
        drafter = PredictionDrafter(make_options(PredictionOptions, values, "prediction"))
        for expected, first in ((None, 4), ([1, 2], 1)):  # a request's own goes first
            (tree,) = drafter.propose([Ask(drafter.open(sampler(expected)), PROMPT, Budget(1, 1))])
            assert tree.tokens[1:] == (first,)


def test_says_what_is_missing(tmp_path):
    with pytest.raises(ParameterError, match="prediction"):
        PredictionDrafter().open(sampler(None))
    with pytest.raises(ParameterError, match="tokenizer"):
        PredictionDrafter().open(sampler(tokenizer=None))
    with pytest.raises(ParameterError, match="option file"):
        PredictionDrafter(PredictionOptions(file=str(tmp_path / "none"))).open(sampler(None))
    assert drafted(PredictionDrafter().open(sampler([])), [1]) == []


@pytest.mark.parametrize(
    "values, named",
    [
        ({"text": "a", "file": "b"}, "file"),
        ({"max_match": 1}, "max_match"),
        ({"max_length": 0}, "max_length"),
        ({"min_probability": -1}, "min_probability"),
    ],
)
def test_bad_options_are_named(values, named):
    with pytest.raises(ParameterError, match=named):
        PredictionOptions(**values)


@pytest.mark.parametrize("temperature, rule", [(0.0, "block"), (1.0, "coupled")])
def test_output_equals_plain_decoding(temperature, rule):
    target = TableTarget(vocab_size=6, order=2, sharpness=3.0, eos=())

    def run(drafter, prediction):
        params = SamplingParams(temperature, seed=3, max_tokens=50, prediction=prediction)
        sequences = [Sequence(target, prompt, params, rule, number=i) for i, prompt in enumerate(([1, 2, 3], [4, 5]))]
        rounds = list(decode(target, drafter, sequences))
        return sequences, rounds

    plain, _ = run(NoDrafter(), None)
    right = plain[0].text
    for prediction in (right, right[:10] + "abc" + right[12:], right[::-1], ""):
        sequences, rounds = run(PredictionDrafter(), prediction)
        assert [s.output for s in sequences] == [s.output for s in plain]
        passes = sum(r.sequence == 0 for r in rounds)
        if prediction == right:
            assert passes <= 7  # 50 tokens, up to 9 a pass
        elif prediction[:9] == right[:9]:
            assert passes <= 12
