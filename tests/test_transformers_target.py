"""Cache truth: whatever way the rows are computed, they are what transformers' own full forward gives for the sequence."""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from typing import Any, ClassVar

import pytest
import torch
from toys import bushy, fill, letters, plain, run, tiny_model, tiny_target

from outrider.drafters import NoDrafter
from outrider.errors import LoadError, ParameterError
from outrider.sampling import SamplingParams
from outrider.targets import transformers as shipped
from outrider.targets.hf_tokenizer import HFTokenizer
from outrider.targets.transformers import TransformersTarget
from outrider.tree import DraftTree

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_local_experts": 4}
MLA = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
SLIDING = {"sliding_window": 16, "head_dim": 8}
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 3.0, 9.0, 20.0],
}

CASES: dict[str, tuple[str, dict[str, Any], torch.dtype, float]] = {
    "llama": ("llama", {}, torch.float64, 1e-9),
    "llama, float32": ("llama", {}, torch.float32, 2e-4),
    "llama, one KV head": ("llama", {"num_key_value_heads": 1}, torch.float64, 1e-9),
    "llama, dynamic rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        torch.float64,
        1e-9,
    ),
    "qwen2": ("qwen2", {}, torch.float64, 1e-9),
    "qwen2, sliding above": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
        torch.float64,
        1e-9,
    ),
    "qwen3": ("qwen3", {"head_dim": 8}, torch.float64, 1e-9),
    "mistral": ("mistral", SLIDING, torch.float64, 1e-9),
    "gemma2": ("gemma2", {**SLIDING, "attn_logit_softcapping": 3.0}, torch.float64, 1e-5),  # its own softmax is in float32
    "gemma3": (
        "gemma3_text",
        {**SLIDING, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        torch.float64,
        1e-9,
    ),
    "gpt2": ("gpt2", GPT2, torch.float64, 1e-9),
    "gpt2, scaled by layer": ("gpt2", {**GPT2, "scale_attn_by_inverse_layer_idx": True}, torch.float64, 1e-9),
    "phi3": ("phi3", {"sliding_window": 16}, torch.float64, 1e-9),
    "phi3, longrope": (
        "phi3",
        {"sliding_window": None, "original_max_position_embeddings": 64, "rope_parameters": LONGROPE},
        torch.float64,
        1e-9,
    ),
    "cohere2": ("cohere2", {"sliding_window": 16}, torch.float64, 1e-9),
    "gpt-oss": ("gpt_oss", {**SLIDING, **MOE}, torch.float32, 2e-4),
    "mixtral": ("mixtral", MOE, torch.float32, 2e-4),
    "qwen3_moe": ("qwen3_moe", {"head_dim": 8, **MOE}, torch.float32, 2e-4),
    "deepseek_v3": ("deepseek_v3", MLA, torch.float32, 2e-4),
}
every_case = pytest.mark.parametrize("case", CASES)
LENGTH = 44


@functools.cache
def built(case: str) -> tuple[TransformersTarget, list[int], torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """The target, a text, and what transformers itself says about it: logits, states by layer, final states."""
    kind, config, dtype, _ = CASES[case]
    model = tiny_model(kind, 0, dtype, **config)
    text = letters(model, LENGTH)
    with torch.no_grad():
        out = model(torch.tensor([text]), use_cache=False, output_hidden_states=True)
    logits, states = out.logits[0].clone(), [state[0].clone() for state in out.hidden_states]
    return TransformersTarget(model, name=case), text, logits, states[:-1], states[-1]


@every_case
def test_is_what_transformers_computes(case: str) -> None:
    """Trees along the text, next to another sequence that stays behind: logits and hidden states of the right path."""
    t, text, logits, states, final = built(case)
    limit = CASES[case][3]
    layers = (0, 1, t.n_layers, "final")
    slot, other = fill(t, text[:9]), fill(t, text[:30])
    at = 9
    for n in itertools.cycle((4, 1, 3, 2)):
        if at + n > LENGTH - 1:
            break
        tree, right = bushy(text, at, n)
        mine, theirs = t.forward([(slot, tree), (other, DraftTree.chain(text[30], [5, 6]))], layers)
        rows = slice(at, at + n)
        assert (mine.start, theirs.start) == (at, 30)
        assert (mine.logits[right] - logits[rows]).abs().max() < limit
        assert (theirs.logits[0] - logits[30]).abs().max() < limit
        for key, wanted in ((0, states[0]), (1, states[1]), ("final", final)):
            assert (mine.hidden[key][right] - wanted[rows]).abs().max() < limit, key
            assert (theirs.hidden[key][0] - wanted[30]).abs().max() < limit, key
        normed = t._decoder.norm if hasattr(t._decoder, "norm") else getattr(t._decoder, "ln_f", None)
        with torch.no_grad():
            assert (normed(mine.hidden[t.n_layers][right]) - final[rows]).abs().max() < limit
            assert torch.equal(t.embed(tree.tokens), t.model.get_input_embeddings()(torch.tensor(tree.tokens)))
        t.commit(slot, right)
        t.commit(other, [0])
        t.truncate(other, 30)
        at += n
    assert slot.length == at > LENGTH - 5
    t.close(slot)
    t.close(other)


@every_case
def test_tree_is_its_paths(case: str) -> None:
    """Every node of a tree has the logits of its path drafted as a chain; after commit they are a fresh prefill's."""
    t, text, _, _, _ = built(case)
    limit = CASES[case][3]
    tree = DraftTree((text[13], 4, 5, 6, 7, 8, 9, 4), (-1, 0, 0, 1, 1, 2, 4, 6))
    slot = fill(t, text[:13])
    (whole,) = t.forward([(slot, tree)])
    for node in range(len(tree)):
        alone = fill(t, text[:13])
        (path,) = t.forward([(alone, DraftTree.chain(text[13], tree.path_tokens(node)))])
        assert (whole.logits[node] - path.logits[-1]).abs().max() < limit
        t.close(alone)
    kept = tree.path(7)
    whole_logits = whole.logits.clone()
    t.commit(slot, kept)
    (after,) = t.forward([(slot, DraftTree((11, 12), (-1, 0)))])
    fresh = fill(t, [*text[:13], text[13], *tree.path_tokens(7)])
    (wanted,) = t.forward([(fresh, DraftTree((11, 12), (-1, 0)))])
    assert (after.logits - wanted.logits).abs().max() < limit
    t.commit(fresh, ())  # a pass of which nothing is kept leaves no trace
    t.truncate(fresh, 13)
    (again,) = t.forward([(fresh, tree)])
    assert (again.logits - whole_logits).abs().max() < limit


@every_case
def test_prefill_in_chunks(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    t, text, logits, states, final = built(case)
    limit = CASES[case][3]
    for rows in (1, 7, 16, 17, 512):
        monkeypatch.setattr(shipped, "PREFILL_ROWS", rows)
        slot = t.open()
        outputs = list(t.prefill(slot, text, layers=(1, "final"), logits=True))
        assert [len(o.logits) for o in outputs] == [min(rows, LENGTH - at) for at in range(0, LENGTH, rows)]
        assert [o.start for o in outputs] == list(range(0, LENGTH, rows))
        assert (torch.cat([o.logits for o in outputs]) - logits).abs().max() < limit
        assert (torch.cat([o.hidden[1] for o in outputs]) - states[1]).abs().max() < limit
        assert (torch.cat([o.hidden["final"] for o in outputs]) - final).abs().max() < limit
        assert all(o.logits is None for o in t.prefill(t.open(), text))
        t.close(slot)


@pytest.mark.parametrize("case", ["llama", "llama, float32", "mistral", "gemma2", "gemma3"])
def test_many_rows(case: str) -> None:
    """Passes of more rows than the small kernel takes, and slots that outgrow their first capacity."""
    kind, config, dtype, limit = CASES[case]
    model = tiny_model(kind, 0, dtype, **config, **{"max_position_embeddings": 700})
    text = letters(model, 640)
    with torch.no_grad():
        logits = model(torch.tensor([text]), use_cache=False).logits[0].clone()
    t = TransformersTarget(model)
    slot = fill(t, text[:530])  # two chunks
    (output,) = t.forward([(slot, DraftTree.chain(text[530], text[531:600]))])  # 70 rows behind 530
    assert (output.logits - logits[530:600]).abs().max() < limit
    tree, right = bushy(text, 530, 20)  # 77 rows of a tree
    t.commit(slot, ())
    (output,) = t.forward([(slot, tree)])
    assert len(tree) > 64
    assert (output.logits[right] - logits[530:550]).abs().max() < limit
    t.commit(slot, right)
    for at in range(550, 639):
        (output,) = t.forward([(slot, DraftTree.chain(text[at]))])
        t.commit(slot, [0])
    assert (output.logits[0] - logits[638]).abs().max() < limit


@pytest.mark.parametrize("case", ["mistral", "gemma3", "phi3", "cohere2", "qwen2, sliding above", "gemma2", "gpt-oss"])
@pytest.mark.parametrize("length", range(10, 22))
def test_both_sides_of_the_window(case: str, length: int) -> None:
    """Window 16: prompts that end before, at and after it, trees that reach over it."""
    t, text, logits, _, _ = built(case)
    for n in (1, 2, 5, 9):
        slot = fill(t, text[:length])
        tree, right = bushy(text, length, n)
        (output,) = t.forward([(slot, tree)])
        assert (output.logits[right] - logits[length : length + n]).abs().max() < CASES[case][3]
        t.commit(slot, right)
        (output,) = t.forward([(slot, DraftTree.chain(text[length + n]))])
        assert (output.logits[0] - logits[length + n]).abs().max() < CASES[case][3]


@pytest.mark.parametrize("case", ["llama", "gemma3", "phi3, longrope", "llama, dynamic rope", "gpt-oss", "deepseek_v3"])
def test_batch_is_solo(case: str) -> None:
    """Sequences of unequal lengths and trees in one pass: each as if it were alone."""
    t, text, _, _, _ = built(case)
    limit = CASES[case][3]
    lengths = (1, 40, 17, 3)
    trees = [bushy(text, n, size)[0] for n, size in zip(lengths, (3, 1, 4, 2))]
    together = t.forward([(fill(t, text[:n]), tree) for n, tree in zip(lengths, trees)], (1, "final"))
    copies = [(o.logits.clone(), o.hidden["final"].clone()) for o in together]
    for n, tree, (logits, final) in zip(lengths, trees, copies):
        (alone,) = t.forward([(fill(t, text[:n]), tree)], ("final",))
        assert (alone.logits - logits).abs().max() < limit
        assert (alone.hidden["final"] - final).abs().max() < limit


@pytest.mark.parametrize("case", ["llama", "gemma3", "deepseek_v3"])
def test_fork_and_truncate(case: str) -> None:
    t, text, logits, _, _ = built(case)
    limit = CASES[case][3]
    slot = fill(t, text[:25])
    forks = [t.open(slot, n) for n in (25, 20, 1, 99)]
    assert [f.length for f in forks] == [25, 20, 1, 25]
    for junk in (slot, forks[0]):  # what happens to one is not seen by the others
        (_,) = t.forward([(junk, DraftTree.chain(9, [9, 9, 9]))])
        t.commit(junk, [0, 1, 2, 3])
    for fork in forks[1:]:
        at = fork.length
        (output,) = t.forward([(fork, DraftTree.chain(text[at], text[at + 1 : at + 4]))])
        assert (output.logits - logits[at : at + 4]).abs().max() < limit
    for at in (22, 10, 0):
        t.truncate(slot, at)
        (output,) = t.forward([(slot, DraftTree.chain(text[at], text[at + 1 : at + 4]))])
        assert (output.logits - logits[at : at + 4]).abs().max() < limit
        t.commit(slot, [0, 1])
        assert slot.length == at + 2
    t.truncate(slot, 99)
    assert slot.length == 2


def test_rows_that_are_computed() -> None:
    """A batch of seven plain sequences and one tree of 17 nodes computes 24 rows, and hidden states cost none."""
    t, text, _, _, _ = built("llama")
    work = [(fill(t, text[: 3 + 5 * i]), DraftTree.chain(text[i])) for i in range(7)]
    tree = DraftTree((1, *range(3, 19)), (-1, *[0] * 4, *[1] * 4, *[2] * 4, *[5] * 4))
    work.append((fill(t, text), tree))
    rows: list[int] = []
    linear = [m for m in t.model.modules() if isinstance(m, torch.nn.Linear)]
    hooks = [
        m.register_forward_hook(lambda _, args, __: rows.append(args[0].reshape(-1, args[0].shape[-1]).shape[0]))
        for m in linear
    ]
    outputs = t.forward(work, (0, 2, "final"))
    for hook in hooks:
        hook.remove()
    assert len(tree) == 17 and rows == [24] * len(linear)
    assert [len(o.logits) for o in outputs] == [1] * 7 + [17]
    assert [len(o.hidden[2]) for o in outputs] == [1] * 7 + [17]


def test_a_prefill_computes_no_logits() -> None:
    t, text, _, _, _ = built("llama")
    calls: list[int] = []
    hook = t.model.get_output_embeddings().register_forward_hook(lambda *_: calls.append(1))
    fill(t, text)
    hook.remove()
    assert not calls


def test_slots_are_freed() -> None:
    t, text, _, _, _ = built("llama")
    slot = fill(t, text)
    kept = [weakref.ref(tensor) for store in (slot.keys, slot.values) for tensor in store.values()]
    assert len(kept) == 2 * t.n_layers
    t._last_pass = None
    t.close(slot)
    gc.collect()
    assert not any(ref() is not None for ref in kept)
    t.close(slot)  # twice is harmless
    for use in (
        lambda: t.forward([(slot, DraftTree.chain(1))]),
        lambda: list(t.prefill(slot, [1, 2])),
        lambda: t.commit(slot, [0]),
        lambda: t.truncate(slot, 0),
        lambda: t.open(slot, 1),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            use()


def test_a_pass_keeps_no_slot_alive() -> None:
    """After a sequence is closed nothing of the target holds on to its memory."""
    t, text, _, _, _ = built("llama")
    slot = fill(t, text)
    ref = weakref.ref(slot.keys[0])
    t.close(slot)
    gc.collect()
    assert ref() is None


def test_outputs_are_no_leaves_of_a_graph() -> None:
    t, text, _, _, _ = built("llama")
    (output,) = t.forward([(fill(t, text[:3]), DraftTree.chain(1, [2]))], (1,))
    assert not output.logits.requires_grad and not output.hidden[1].requires_grad


def test_head_gives_the_logits() -> None:
    for case in ("llama", "qwen3", "gpt2", "gemma2", "cohere2"):  # the last two scale or bend their logits
        t, text, _, _, _ = built(case)
        (output,) = t.forward([(fill(t, text[:3]), DraftTree.chain(1, [2]))], ("final",))
        assert torch.allclose(t.head(output.hidden["final"]), output.logits)


def test_unknown_layers_are_refused() -> None:
    t, text, _, _, _ = built("llama")

    def hooks() -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in t.model.modules())

    before = hooks()
    for key in (-1, t.n_layers + 1, "last"):
        with pytest.raises(ParameterError, match="no layer"):
            t.forward([(fill(t, text[:3]), DraftTree.chain(1))], (0, key))
    assert hooks() == before  # the good key of the two has left nothing behind


@pytest.mark.parametrize("case", ["llama", "mistral", "gemma3", "gpt2"])
def test_plain_decoding_is_generate(case: str) -> None:
    """Greedy decoding of the engine is transformers' own, beyond the window too."""
    kind, config, dtype, _ = CASES[case]
    model = tiny_model(kind, 3, dtype, spread=0.3, **config)
    prompts = [letters(model, n, seed=n) for n in (5, 12, 18)]
    wanted = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0, "repetition_penalty": 1.8, "eos_token_id": None}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        wanted.append(tuple(out[0, len(prompt) :].tolist()))
    t = TransformersTarget(model)
    params = SamplingParams(max_tokens=30, repetition_penalty=1.8, ignore_eos=True)
    assert [o.tokens for o in plain(t, prompts, params)] == wanted
    assert any(len(set(tokens)) > 5 for tokens in wanted)


# ---- what is refused ---------------------------------------------------------------------------------------------------


DECODER = {"d_model": 32, "decoder_layers": 3, "decoder_attention_heads": 4, "decoder_ffn_dim": 64, "is_decoder": True}


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        ("mamba", {}, "layers 0, 1, 2 are of kind 'linear_attention'"),
        ("qwen3_next", {"head_dim": 8, **MOE}, "layers 0, 1, 2 are of kind 'linear_attention'"),
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "layers 0, 2 are of kind 'conv'"),
        ("llama4_text", {"head_dim": 8, **MOE}, "layers 0, 1, 2 are of kind 'chunked_attention'"),
        ("bert", {}, "looks both ways"),
        ("bart", DECODER, "says something else than by itself"),  # counts positions from its own cache
        (
            "roberta",
            {"is_decoder": True, "pad_token_id": 1},
            "says something else than by itself",
        ),  # so does this one, from the padding
        ("doge", {"keep_window_size": 4}, "makes an attention mask of its own"),
        ("bloom", {}, "layers 0, 1, 2 of BloomForCausalLM do not attend"),
        ("falcon", {}, "layers 0, 1, 2 of FalconForCausalLM do not attend"),
    ],
)
def test_refusals(kind: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        TransformersTarget(tiny_model(kind, 0, torch.float32, **config), name=kind)


def test_longrope_ends_where_its_positions_change() -> None:
    """Beyond it one pass would rotate its rows otherwise than the keys in the cache."""
    t, text, _, _, _ = built("phi3, longrope")
    assert t.context_length == 64
    assert built("llama, dynamic rope")[0].context_length == 256
    outcome = plain(t, [text], SamplingParams(max_tokens=100, ignore_eos=True))
    assert (len(outcome[0].tokens), outcome[0].finish) == (64 - LENGTH, "length")


class FewTokens:
    """A tokenizer of 90 tokens for a model with 101 rows of logits."""

    eos_token_id = 7
    all_special_ids = (7,)
    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def get_vocab(self) -> dict[str, int]:
        return {chr(0x4E00 + i): i for i in range(90)}

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(chr(0x4E00 + t) for t in tokens if t != self.eos_token_id)


def test_padding_rows_of_the_logits_are_cut_off() -> None:
    model = tiny_model("llama", 0, torch.float64)
    model.get_output_embeddings().weight.data[95] = 5.0 * model.get_output_embeddings().weight.data.norm()
    t = TransformersTarget(model, HFTokenizer(FewTokens()))
    assert t.vocab_size == 90
    (output,) = t.forward([(t.open(), DraftTree.chain(3, [4]))], ("final",))
    assert output.logits.shape == (2, 90) and t.head(output.hidden["final"]).shape == (2, 90)
    found, _ = run(
        t, NoDrafter(), [[3, 4]] * 20, [SamplingParams(temperature=5.0, max_tokens=10, seed=s) for s in range(20)], "coupled"
    )
    assert all(token < 90 for o in found for token in o.tokens)


def test_ends_of_generation() -> None:
    """All that anybody calls an end is one; ids that the model does not have are not."""
    model = tiny_model("llama", 0, torch.float64)
    model.generation_config.eos_token_id = [5, 6, 5000]
    model.config.eos_token_id = -1
    t = TransformersTarget(model, HFTokenizer(FewTokens()))
    assert t.eos == {5, 6, 7}
    run(t, NoDrafter(), [[3, 4]], SamplingParams(min_tokens=3, max_tokens=5, logprobs=1))  # min_tokens masks them all
    model = tiny_model("llama", 0, torch.float64, eos_token_id=None)
    model.generation_config.eos_token_id = None
    assert TransformersTarget(model).eos == frozenset()


def test_the_model_belongs_to_its_target() -> None:
    t = tiny_target()
    with pytest.raises(RuntimeError, match="through its target"):
        t.model(torch.tensor([[1, 2]]))


def test_figures_about_memory() -> None:
    t = tiny_target()
    weights = sum(p.numel() * 8 for p in t.model.parameters())
    assert weights <= t.memory()["weights"] < 1.01 * weights  # small buffers come on top
    assert t.memory()["kv_per_token"] == 3 * 2 * 2 * 8 * 8  # layers, keys and values, heads, width, bytes
