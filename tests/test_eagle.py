"""EAGLE heads: every dialect is read as its engine reads it, the maths are those of the reference, and the head follows the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import eagles
import pytest
import torch
from following import Now, check_accepted, check_cut_and_fork, shadow
from toys import letters, plain, tiny_target

from outrider.decode import Sequence as Decoded
from outrider.decode import decode, open_sequence
from outrider.drafters.base import Ask
from outrider.drafters.eagle import EagleDrafter, EagleOptions
from outrider.drafters.features import MANY, PAIRS, FeatureState
from outrider.errors import LoadError
from outrider.sampling import SamplingParams
from outrider.targets.attention import KVSlot, Segment
from outrider.tree import Budget, DraftTree

EVERYTHING = EagleOptions(min_probability=0.0)
PROMPT = [5, 6, 7, 8]
LENGTH = 50


def load(target: Any, folder: str, **options: Any) -> EagleDrafter:
    return EagleDrafter.load(target, EagleOptions(**{"min_probability": 0.0, **options}), folder)


def refusal(target: Any, folder: str, **options: Any) -> str:
    with pytest.raises(LoadError) as error:
        load(target, folder, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def target() -> Any:
    return tiny_target("llama", spread=0.25)


# ---- dialects --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", eagles.DIALECTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tensor_reaches_its_place(dialect: str, dtype: torch.dtype, target: Any, tmp_path: Path) -> None:
    config, tensors = eagles.make(dialect, draft=range(3, 60))
    tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    head = load(target, eagles.write(tmp_path, dialect, config, tensors)).head
    for name, tensor in eagles.tensors_of(head, tensors).items():
        assert torch.equal(tensor, tensors[name]), name
    parameters = dict(head.named_parameters())
    assert len(parameters) == sum(t.is_floating_point() for t in tensors.values())
    assert {p.dtype for p in parameters.values()} == {torch.float64} and not any(p.is_meta for p in parameters.values())
    assert head.body.rotary_emb.inv_freq.dtype == torch.float32
    if dialect != "eagle":
        assert head.draft_ids.tolist() == list(range(3, 60))
        assert head.logits(torch.ones(1, 32, dtype=torch.float64)).shape == (1, 57)
    says = load(target, str(tmp_path)).describe()
    assert says["embeddings"] == ("its own" if dialect == "speculators" else "the target's")
    assert says["output matrix"] == ("the target's" if dialect == "eagle" else "its own")


def layers_of(target: Any, folder: Path, dialect: str, taken: int = 3, options: Any = None, **keys: Any) -> tuple[Any, ...]:
    config, tensors = eagles.make(dialect, taken=taken)
    return load(target, eagles.write(folder, dialect, {**config, **keys}, tensors), **(options or {})).layers


def test_layers_mean_what_each_dialect_means(tmp_path: Path) -> None:
    t = tiny_target("llama", num_hidden_layers=8)
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    for dialect in ("safeailab", "specforge", "speculators"):
        assert layers_of(t, tmp_path / dialect, dialect) == (2, 4, 5)
    assert layers_of(t, tmp_path / "a", "specforge", eagle_config=ids) == (2, 4, 5)  # outputs of these layers
    assert layers_of(t, tmp_path / "b", "specforge", **ids) == (2, 4, 5)
    assert layers_of(t, tmp_path / "c", "speculators", **ids) == (1, 3, 4)  # entries
    last = {"eagle_aux_hidden_state_layer_ids": [1, 8]}
    assert layers_of(t, tmp_path / "d", "specforge", 2, eagle_config=last) == (1, 8)  # a last id of 8 can only be an entry
    assert layers_of(t, tmp_path / "e", "speculators", 2, **last) == (1, 8)
    assert layers_of(t, tmp_path / "f", "specforge", options={"layers": (0, 5, 8)}, eagle_config=ids) == (0, 5, 8)
    assert layers_of(t, tmp_path / "g", "eagle") == ("final",)


def test_norm_before_fc_wherever_it_is_said(target: Any, tmp_path: Path) -> None:
    """NVIDIA's heads say it in the config within the config, which goes before the other."""
    config, tensors = eagles.make("specforge")
    tensors["input_norm.weight"] = torch.rand(96) + 0.5
    hidden = torch.randn(2, 96, dtype=torch.float64)
    fused = []
    for number, says in enumerate(({"norm_before_fc": True}, {"eagle_config": {"norm_before_fc": True}}, {})):
        folder = eagles.write(tmp_path / str(number), "specforge", {**config, **says}, tensors)
        fused.append(load(target, folder).head.fuse(hidden))
    own = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-5) * tensors["input_norm.weight"]
    assert torch.equal(fused[0], fused[1]) and torch.equal(fused[0], fused[2])
    assert torch.allclose(fused[0], own @ tensors["fc.weight"].double().T, atol=1e-5)  # the norm is in float32
    both = {**config, "norm_before_fc": True, "eagle_config": {"norm_before_fc": False}}
    assert "input_norm.weight" in refusal(target, eagles.write(tmp_path / "both", "specforge", both, tensors))


def test_rope_theta_is_the_heads_own(target: Any, tmp_path: Path) -> None:
    def theta(name: str, dialect: str, options: dict[str, Any], **changes: Any) -> float:
        config, tensors = eagles.make(dialect, **changes)
        head = load(target, eagles.write(tmp_path / name, dialect, config, tensors), **options).head
        return head.body.config.rope_parameters["rope_theta"]

    assert theta("a", "safeailab", {}) == 10000.0
    assert theta("b", "safeailab", {}, rope_theta=500000.0) == 500000.0
    assert theta("c", "specforge", {}, rope_parameters={"rope_type": "default", "rope_theta": 7.0}) == 7.0
    assert theta("d", "speculators", {}, rope_parameters={"rope_type": "default", "rope_theta": 8.0}) == 8.0
    assert theta("e", "eagle", {"rope_theta": 9.0}, rope_theta=500000.0) == 9.0
    linear = {"rope_type": "linear", "factor": 4.0}
    config, tensors = eagles.make("safeailab", rope_scaling=linear)
    scaled = load(target, eagles.write(tmp_path / "f", "safeailab", config, tensors)).head.body.config.rope_parameters
    assert (scaled["rope_type"], scaled["factor"], scaled["rope_theta"]) == ("linear", 4.0, 10000.0)


def test_output_matrix_and_embeddings_from_wherever_they_are(target: Any, tmp_path: Path) -> None:
    config, tensors = eagles.make("specforge")
    del tensors["lm_head.weight"]
    borrowed = load(target, eagles.write(tmp_path / "a", "specforge", {**config, "draft_vocab_size": None}, tensors)).head
    states = torch.randn(3, 32, dtype=torch.float64)
    assert torch.equal(borrowed.logits(states), target.head(borrowed.norm(states)))
    table = torch.randn(101, 32)
    tied = {**tensors, "embed_tokens.weight": table}
    head = load(target, eagles.write(tmp_path / "b", "specforge", {**config, "tie_word_embeddings": True}, tied)).head
    assert torch.equal(head.logits(states), head.norm(states) @ table.double().T)
    assert torch.equal(head.embed([7, 3]), table.double()[[7, 3]])
    folder = eagles.write(tmp_path / "d", "specforge", {**config, "tie_word_embeddings": True}, tensors)
    assert "tie_word_embeddings" in refusal(target, folder)
    own = tiny_target("llama", tie_word_embeddings=True)
    head = load(own, folder).head
    assert torch.equal(head.logits(states), own.head(head.norm(states)))
    padded = {**eagles.make("specforge")[1]}
    padded["lm_head.weight"] = torch.randn(128, 32)
    assert load(target, eagles.write(tmp_path / "c", "specforge", config, padded)).head.logits(states).shape == (3, 101)


def test_a_reduced_vocabulary_in_any_order(target: Any, tmp_path: Path) -> None:
    """The draft's ids need not rise, and may name tokens that the target has no text for: these are never drafted."""
    config, tensors = eagles.make("safeailab", draft=range(3, 60))
    wanted = load(target, eagles.write(tmp_path / "a", "safeailab", config, tensors)).head
    ids = torch.cat([torch.arange(3, 60), torch.tensor([103])])
    known = torch.zeros(110, dtype=torch.bool)
    known[ids] = True
    order = torch.randperm(58, generator=torch.Generator().manual_seed(1))
    matrix = torch.cat([tensors["lm_head.weight"], torch.full((1, 32), 9.0)])[order]
    mixed = {**tensors, "lm_head.weight": matrix, "d2t": ids[order] - torch.arange(58), "t2d": known}
    head = load(target, eagles.write(tmp_path / "b", "safeailab", {**config, "draft_vocab_size": 58}, mixed)).head
    assert head.draft_ids.tolist() == wanted.draft_ids.tolist() == list(range(3, 60))
    states = torch.randn(4, 32, dtype=torch.float64)
    assert torch.allclose(head.logits(states), wanted.logits(states), atol=1e-12)


@pytest.mark.parametrize("dialect", eagles.DIALECTS)
def test_layers_are_called_directly_where_that_is_the_same(dialect: str, target: Any, tmp_path: Path) -> None:
    config, tensors = eagles.make(dialect)
    head = load(target, eagles.write(tmp_path, dialect, config, tensors)).head
    assert head.straight

    def states() -> torch.Tensor:
        return head.run([1, 2], torch.ones(2, 32, dtype=torch.float64), [0, 1], [Segment(KVSlot(), DraftTree.chain(1, [2]), 0)])

    before = states()
    hook = head.body.register_forward_hook(lambda _, __, out: {"last_hidden_state": 2 * out["last_hidden_state"]})
    assert torch.allclose(states(), before, atol=1e-12)  # the body itself is not called
    hook.remove()
    head.body.register_forward_hook(lambda _, __, out: type(out)(last_hidden_state=2 * out.last_hidden_state))
    head.straight = False
    head.straighten(states)  # a decoder that does more than its layers
    assert not head.straight and torch.allclose(states(), 2 * before, atol=1e-12)


# ---- the maths -------------------------------------------------------------------------------------------------------------


def chains(head: Any, embeddings: list[int], features: torch.Tensor, depth: int) -> torch.Tensor:
    """Logits ``[depth, n, V]``: for each i, pairs up to i with true features, and behind them those of the given tokens with the
    head's own states, level by level.
    """
    n = len(features)
    found = torch.zeros(depth, n, head.vocab_size, dtype=features.dtype)
    for i in range(n):
        kv, tree = KVSlot(), DraftTree.chain(0, [0] * i)
        states = head.run(embeddings[: i + 1], features[: i + 1], range(i + 1), [Segment(kv, tree, 0)])[-1:]
        kv.length = i + 1
        found[0, i] = eagles.every_logit(head, states)[0]
        for k in range(1, min(depth, n - i)):
            segment = Segment(kv, DraftTree.chain(0, [0] * k), 0, since=k)
            states = head.run([embeddings[i + k]], head.recycle(states), [i + k], [segment])
            kv.length += 1
            found[k, i] = eagles.every_logit(head, states)[0]
    return found


NO_LIBRARY = (
    "the speculators library is not installed: it needs 300 MB of packages, and an older transformers than the lock has"
)
FLAGS: list[dict[str, Any]] = [
    {},
    {"norm_before_residual": True},
    {"norm_output": True},
    {"fc_norm": True},
    {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True},
]


@pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")
@pytest.mark.parametrize("flags", FLAGS, ids=lambda f: "+".join(f) or "plain")
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3 with a window"])
def test_equals_the_speculators_library(flags: dict[str, Any], family: str, tmp_path: Path) -> None:
    """A head made and saved by the library, and the logits of its forward at every depth. (With a sliding window only at the first:
    the library's training leaves the window where it was while a draft goes on.)
    """
    eagle3 = pytest.importorskip("speculators.models.eagle3", reason=NO_LIBRARY)
    from transformers import AutoConfig

    changes: dict[str, Any] = {}
    if family != "llama":
        changes = {"head_dim": 16, "num_hidden_layers": 2}
    if "window" in family:
        changes |= {"use_sliding_window": True, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
    layer = AutoConfig.for_model(**eagles.layer_config(family.split()[0], 32, 4, 101, **changes))
    layer._attn_implementation = "eager"
    layers = {"eagle_aux_hidden_state_layer_ids": [2, 1, 0]}
    with torch.random.fork_rng():
        torch.manual_seed(4)
        made = eagle3.Eagle3DraftModel(
            eagle3.Eagle3SpeculatorConfig(transformer_layer_config=layer, draft_vocab_size=40, **layers, **flags)
        )
        for name, parameter in made.named_parameters():
            parameter.data = torch.randn_like(parameter) * 0.2 + ("norm" in name)
        used = torch.randperm(101)[:40].sort().values
        hidden, tokens = torch.randn(12, 96), torch.randint(0, 101, (12,))
    known = torch.zeros(101, dtype=torch.bool)
    known[used] = True
    made.load_vocab_mappings(known, used - torch.arange(40))
    made.save_pretrained(tmp_path)

    wanted: list[torch.Tensor] = []
    made.lm_head.register_forward_hook(lambda *a: wanted.append(a[2][0].detach()))
    with torch.no_grad():
        made(hidden[None], tokens[None], torch.zeros(1, 12, dtype=torch.long), ttt_steps=4)

    target = tiny_target("llama", dtype=torch.float32)
    head = load(target, str(tmp_path)).head
    with torch.inference_mode():
        found = chains(head, tokens.tolist(), head.fuse(hidden), 4)
    for k in range(1 if "window" in family else 4):
        assert torch.allclose(found[k, : 12 - k][:, used], wanted[k][: 12 - k], atol=1e-5, rtol=0), k


@pytest.mark.parametrize("dialect", eagles.DIALECTS)
def test_equals_the_paper_step_by_step(dialect: str, target: Any, tmp_path: Path) -> None:
    """One pair at a time in plain tensors, without a cache: the formulas, and nothing of the modules."""
    config, tensors = eagles.make(dialect, draft=range(0, 101, 2))
    head = load(target, eagles.write(tmp_path, dialect, config, tensors)).head
    w = {name.removeprefix(eagles.PREFIX[dialect]): t.double() for name, t in tensors.items() if t.is_floating_point()}
    table = w.get("embed_tokens.weight", target.model.get_input_embeddings().weight.detach())
    tokens = letters(None, 9, 3)
    hidden = torch.randn(9, 32 if dialect == "eagle" else 96, dtype=torch.float64)

    def norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * gain

    def turn(x: torch.Tensor, position: int) -> torch.Tensor:
        angle = position * 10000.0 ** (-torch.arange(4).double() / 4)
        a, b = x[:, :4], x[:, 4:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []

    def pair(token: int, g: torch.Tensor, position: int) -> torch.Tensor:
        if dialect == "eagle":
            g = w["fc.weight"] @ torch.cat([table[token], g]) + w["fc.bias"]
            x = g
        else:
            x = torch.cat([norm(table[token], w["input_layernorm.weight"]), norm(g, w["hidden_norm.weight"])])
        q = turn((w["self_attn.q_proj.weight"] @ x).view(4, 8), position)
        keys.append(turn((w["self_attn.k_proj.weight"] @ x).view(2, 8), position))
        values.append((w["self_attn.v_proj.weight"] @ x).view(2, 8))
        k, v = (torch.stack(store).repeat_interleave(2, 1) for store in (keys, values))  # [m, 4, 8]
        weight = (torch.einsum("hd,mhd->hm", q, k) / 8**0.5).softmax(-1)
        h = g + w["self_attn.o_proj.weight"] @ torch.einsum("hm,mhd->hd", weight, v).reshape(-1)
        x = norm(h, w["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(w["mlp.gate_proj.weight"] @ x) * (w["mlp.up_proj.weight"] @ x)
        return h + w["mlp.down_proj.weight"] @ gate

    with torch.inference_mode():
        found = chains(head, tokens, head.fuse(hidden), 3)
    fused = hidden if dialect == "eagle" else hidden @ w["fc.weight"].T
    for i in range(7):
        keys.clear()
        values.clear()
        state = torch.zeros(0)
        for j in range(i + 1):
            state = pair(tokens[j], fused[j], j)
        for k in range(3):
            if k:
                state = pair(tokens[i + k], state, i + k)
            if dialect == "eagle":
                logits = target.model.lm_head.weight.detach() @ state
                assert torch.allclose(found[k, i], logits, atol=1e-5)
            else:
                logits = w["lm_head.weight"] @ norm(state, w["norm.weight"])
                assert torch.allclose(found[k, i, ::2], logits, atol=1e-5)


# ---- the head follows the text ---------------------------------------------------------------------------------------------


@pytest.fixture(params=["eagle", "safeailab"])
def drafter(request: Any, target: Any, tmp_path: Path) -> EagleDrafter:
    config, tensors = eagles.make(request.param)
    return load(target, eagles.write(tmp_path, request.param, config, tensors), shape="tree")


def test_comes_back_after_any_rounds(target: Any, drafter: EagleDrafter) -> None:
    """Three sequences, drafted for in different rounds; in the end each state proposes like a new one."""
    prompts = [PROMPT, [9] * 30, [11, 3, 4]]
    sequences = [
        Decoded(target, p, SamplingParams(max_tokens=23, ignore_eos=True), "rejection", 0, i) for i, p in enumerate(prompts)
    ]
    for sequence in sequences:
        sequence.keep_open = True
    for _ in decode(target, drafter, sequences, Now(lambda call, number: (call + number) % 4 < 2)):
        pass
    for sequence in sequences:
        assert sequence.state.kv.length <= len(sequence.tokens) - 1
        shadow(target, drafter, sequence.state, sequence.tokens)


@pytest.mark.parametrize("kept", [1, 2, 3, 12, 29, 30, 33])
def test_goes_on_after_a_cut_and_a_fork(target: Any, drafter: EagleDrafter, kept: int) -> None:
    """The next turn of a conversation shares its first tokens; a fork has a text of its own."""
    check_cut_and_fork(target, drafter, kept)


def test_a_fork_of_the_prompt(target: Any, drafter: EagleDrafter) -> None:
    prompt = letters(None, 20)
    sequence = Decoded(target, prompt, SamplingParams(), "rejection")
    open_sequence(target, drafter, sequence)
    for end in ([], [5], [6, 7]):
        slot, state = target.open(sequence.slot, sequence.slot.length), sequence.state.fork(sequence.sampler)
        then = Decoded(target, [*prompt, *end], SamplingParams(), "rejection")
        then.attach(slot, state)
        open_sequence(target, drafter, then)
        shadow(target, drafter, state, then.tokens)


def kept_by(kv: KVSlot) -> torch.Tensor:
    """All that it holds."""
    return torch.cat([held[:, : kv.length].flatten() for store in (kv.keys, kv.values) for _, held in sorted(store.items())])


@pytest.mark.parametrize(("pairs", "many"), [(14, MANY), (PAIRS, 10**9), (14, 10**9)])
def test_long_prompts_run_in_parts(
    pairs: int, many: int, target: Any, drafter: EagleDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one pass or several, and with the last layer's states or without those that nobody needs."""
    prompt = letters(None, 100)
    sequences = [Decoded(target, prompt[:n], SamplingParams(), "rejection", 0, n) for n in (100, 40)]
    for sequence in sequences:
        open_sequence(target, drafter, sequence)
    whole = drafter.propose([Ask(s.state, s.tokens, Budget(9, 3)) for s in sequences])
    before = [kept_by(s.state.kv) for s in sequences]
    assert PAIRS > 140 and MANY < 39
    monkeypatch.setattr("outrider.drafters.features.PAIRS", pairs)
    monkeypatch.setattr("outrider.drafters.features.MANY", many)
    for sequence in sequences:
        sequence.state.kv.length = 0
    parts = drafter.propose([Ask(s.state, s.tokens, Budget(9, 3)) for s in sequences])
    assert [(t.tokens, t.parents) for t in whole] == [(t.tokens, t.parents) for t in parts]
    for one, other in zip(before, [kept_by(s.state.kv) for s in sequences]):
        assert torch.allclose(one, other, atol=1e-12)


def test_only_a_single_layer_is_run_for_its_keys_and_values(target: Any, drafter: EagleDrafter) -> None:
    head, layer = drafter.head, drafter.head.body.layers[0]

    def stores() -> bool:
        with head.passing([], True) as run:
            return run.stores

    assert stores()
    head.body.layers.append(layer)
    assert not stores()
    del head.body.layers[1], layer.input_layernorm
    assert not stores()


def test_no_draft_without_the_features(target: Any, drafter: EagleDrafter) -> None:
    """A state that has not seen the text drafts nothing, and after a gap it goes on from where it sees again."""
    sequence = Decoded(target, letters(None, 30), SamplingParams(), "rejection")
    open_sequence(target, drafter, sequence)
    blind = drafter.open(sequence.sampler)
    (tree,) = drafter.propose([Ask(blind, sequence.tokens, Budget(5, 5))])
    assert len(tree) == 1
    (output,) = target.forward([(sequence.slot, DraftTree.chain(sequence.tokens[-1]))], layers=drafter.layers)
    target.commit(sequence.slot, [0])
    tokens = [*sequence.tokens, 17]
    drafter.observe([(blind, tokens, output, [0])])
    (tree,) = drafter.propose([Ask(blind, tokens, Budget(5, 5))])
    assert blind.first == 29 and len(tree) == 6


def test_memory_is_freed(target: Any, drafter: EagleDrafter) -> None:
    sequence = Decoded(target, letters(None, 60), SamplingParams(), "rejection")
    open_sequence(target, drafter, sequence)
    state = sequence.state
    assert isinstance(state, FeatureState) and state.end == 59 and len(state._raw) == 1
    drafter.propose([Ask(state, sequence.tokens, Budget(5, 5))])
    assert state._raw == [] and state.kv.length == 59 and state.features.shape == (59, 32)
    state.close()
    state.close()
    assert state.end == 0 and not state.kv.keys


# ---- right wiring: an overfitted head is accepted --------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["eagle", "safeailab"])
def overfitted(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    t = tiny_target("llama", spread=0.25)
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
    text = [*PROMPT, *plain(t, [PROMPT], params)[0].tokens]
    assert len(set(text)) > 15
    config, tensors = eagles.make(request.param, draft={*text, *range(20)}, scale=0.1)
    head = load(t, eagles.write(tmp_path_factory.mktemp("head"), request.param, config, tensors)).head
    eagles.fit(head, t, text, 130)
    return t, head, text


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_an_overfitted_head_is_accepted(overfitted: Any, shape: str) -> None:
    t, head, text = overfitted
    check_accepted(t, EagleDrafter(head, EagleOptions(shape=shape)), PROMPT, text, (1, 4, 6))
