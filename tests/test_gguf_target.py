"""Cache truth of the GGUF target, with every llama.cpp library that is installed, on tiny files written here."""

from __future__ import annotations

import functools
import itertools
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tiny_gguf import write_gguf
from toys import bushy, fill, letters, tiny_model

from outrider import models
from outrider.targets import llama
from outrider.targets.gguf import GgufTarget
from outrider.targets.llama.placement import Placement
from outrider.tree import DraftTree

FOLDER = Path(tempfile.mkdtemp(prefix="outrider-gguf-"))
LIBRARIES = llama.installed()
if not LIBRARIES:
    pytest.skip("no llama.cpp library is installed: pip install 'outrider[gguf]'", allow_module_level=True)
every_library = pytest.mark.parametrize("library", LIBRARIES)
LENGTH = 44
EXACT = {"ik": 5e-3, "llama.cpp": 1e-4}
"""Rows computed one by one against rows computed together, on float32 files, logits up to 3. ik_llama.cpp's cache holds
values as float16 (found, with keys like that too: up to 3.4e-3); llama.cpp runs in float32 here."""

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_local_experts": 4, "norm_topk_prob": True}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, **MOE},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@functools.cache
def model(kind: str = "llama") -> Any:
    return tiny_model(kind, 0, torch.float32, 0.1, hidden_size=64, intermediate_size=96, **KINDS[kind])


@functools.cache
def file(kind: str = "llama") -> str:
    return write_gguf(FOLDER / f"{kind}.gguf", model(kind))


def precise(library: str) -> dict[str, Any]:
    """As exact as the library gets: ik_llama.cpp keeps values in float16 at best."""
    return {} if library == "ik" else {"flash_attention": False, "cache_type_k": "f32", "cache_type_v": "f32"}


@functools.cache
def target(library: str, kind: str = "llama", **placement: Any) -> GgufTarget:
    return GgufTarget.load(file(kind), library, placement=Placement(**{**precise(library), **placement}))


def one_by_one(t: GgufTarget, tokens: list[int], after: int) -> torch.Tensor:
    """Logits of every row from `after` on, each in a pass of its own."""
    slot = fill(t, tokens[:after])
    rows = []
    for token in tokens[after:]:
        (output,) = t.forward([(slot, DraftTree.chain(token))])
        rows.append(output.logits[0].clone())
        t.commit(slot, (0,))
    t.close(slot)
    return torch.stack(rows)


@every_kind
@every_library
def test_trees_are_their_paths_and_commits_are_prefills(library: str, kind: str) -> None:
    """Every path of a tree as a chain of single rows; after every commit, what a fresh prefill gives. Two slots at once."""
    t = target(library, kind)
    text = letters(model(kind), LENGTH)
    slot, other = fill(t, text[:9]), fill(t, text[:30])
    at = 9
    for n in itertools.cycle((4, 1, 3, 2)):
        if at + n > LENGTH - 1:
            break
        tree, right = bushy(text, at, n)
        mine, theirs = t.forward([(slot, tree), (other, DraftTree.chain(text[30], [5, 6]))])
        mine_logits, theirs_logits = mine.logits.clone(), theirs.logits.clone()
        assert (mine.start, theirs.start) == (at, 30)
        t.commit(slot, right)
        t.commit(other, ())
        for node in range(len(tree)):
            path = [text[at], *tree.path_tokens(node)]
            wanted = one_by_one(t, [*text[:at], *path], at)
            assert (mine_logits[list(tree.path(node))] - wanted).abs().max() < EXACT[library]
        assert (theirs_logits - one_by_one(t, [*text[:30], text[30], 5, 6], 30)).abs().max() < EXACT[library]
        at += n
        (output,) = t.forward([(slot, DraftTree.chain(text[at]))])
        after = output.logits[0].clone()
        t.commit(slot, ())
        fresh = fill(t, text[:at])
        (output,) = t.forward([(fresh, DraftTree.chain(text[at]))])
        assert (after - output.logits[0]).abs().max() < EXACT[library]
        t.close(fresh)
    assert slot.length == at > 30
    t.close(slot)
    t.close(other)
    assert t.open_slots == 0 and len(t._free) == t.placement.n_seq_max


@every_kind
@every_library
def test_is_what_transformers_computes(library: str, kind: str) -> None:
    """Logits and hidden states against transformers on the same weights; the rest of the difference is the cache's float16."""
    t = target(library, kind)
    text = letters(model(kind), LENGTH)
    with torch.no_grad():
        out = model(kind)(torch.tensor([text]), output_hidden_states=True)
    layers = (0, 1, t.n_layers - 1, t.n_layers, "final")
    slot = t.open()
    found = list(t.prefill(slot, text[:20], layers, logits=True))
    tree = DraftTree.chain(text[20], text[21:])
    found += t.forward([(slot, tree)], layers)
    t.commit(slot, ())
    t.close(slot)
    wanted = {key: out.hidden_states[key][0] for key in layers[:3]} | {"final": out.hidden_states[-1][0]}
    limit = 2e-2 if library == "ik" else 2e-3
    for output in found:
        rows = slice(output.start, output.start + len(output.hidden["final"]))
        for key, states in wanted.items():
            assert (output.hidden[key] - states[rows]).abs().max() < limit * states.abs().max(), key
    logits = torch.cat([found[-1].logits])
    assert (logits - out.logits[0, 20:]).abs().max() < limit * out.logits.abs().max()


@every_library
def test_sequences_and_branches_share_the_cache(library: str) -> None:
    """Rows whose cells lie scattered among those of others, heads as wide as of real models: ik_llama.cpp's flash attention leaves
    out a block whose first cell a row does not see, and what lies behind a hole may not be seen either.
    """
    wide = tiny_model("llama", 0, torch.float32, 0.1, hidden_size=256, intermediate_size=96, max_position_embeddings=1024)
    t = GgufTarget.load(write_gguf(FOLDER / "wide.gguf", wide), library, placement=Placement(n_ctx=1024, **precise(library)))
    random = Random(0)
    texts = [letters(wide, n, seed=n) for n in (60, 72, 101, 18)]
    slots = [fill(t, text) for text in texts]
    worst = 0.0
    for number in range(120):
        mine = random.sample(range(4), 3)
        sizes = [random.choice((1, 1, 2, 3, 6, 9)) for _ in mine]
        trees = [DraftTree(tuple(letters(wide, n, number)), (-1, *(random.randrange(k) for k in range(1, n)))) for n in sizes]
        outputs = t.forward([(slots[i], tree) for i, tree in zip(mine, trees)])
        for i, tree, output in zip(mine, trees, outputs):
            path = tree.path(random.randrange(len(tree)))
            branch = [tree.tokens[node] for node in path]
            if not number % 6:
                with torch.no_grad():
                    wanted = wide(torch.tensor([texts[i] + branch])).logits[0, len(texts[i]) :]
                worst = max(worst, float((output.logits[list(path)] - wanted).abs().max()))
            t.commit(slots[i], path)
            texts[i] = texts[i] + branch
        if number == 60:  # a sequence leaves, and a hole; another one comes
            t.close(slots[0])
            texts[0] = letters(wide, 30, seed=1)
            slots[0] = fill(t, texts[0])
    assert sum(map(len, texts)) > 600
    assert worst < (3e-2 if library == "ik" else 1e-3)  # of logits up to 10


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_1", "Q4_0", "Q8_0"])
@every_library
def test_many_rows_are_computed_as_few(library: str, kind: str) -> None:
    """ik_llama.cpp computes garbage for some quantised types from 32 rows on; the target keeps it from doing so."""
    path = write_gguf(FOLDER / f"{kind}.gguf", model(), quantisation=kind)
    t = GgufTarget.load(path, library)
    text = letters(model(), 41)
    slot = fill(t, text[:40])
    (output,) = t.forward([(slot, DraftTree.chain(text[40]))])
    many = output.logits[0].clone()
    assert (many - one_by_one(t, text, 1)[-1]).norm() < 0.02 * many.norm()


QWEN = models.directory() / "qwen2.5-coder-0.5b-instruct.gguf"


@pytest.mark.skipif(not QWEN.exists(), reason=f"no {QWEN}")
@every_library
def test_a_quantised_file(library: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Trees against single rows, within what the library itself does to a chain of as many rows. Q4_K_M: see the printed figures."""
    t = GgufTarget.load(str(QWEN), library, placement=Placement(n_ctx=512))
    assert t.tokenizer is not None
    text = t.tokenizer.encode(
        "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n"
    )[:32]
    single = one_by_one(t, text, 9)
    own = found = after = 0.0
    slot = fill(t, text[:9])
    for at in (9, 13, 17, 21):
        tree, right = bushy(text, at, 4)
        (output,) = t.forward([(slot, DraftTree.chain(text[at], (text[at + 1 :] * 2)[: len(tree) - 1]))])
        own = max(own, float((output.logits[:4] - single[at - 9 : at - 5]).abs().max()))
        t.commit(slot, ())
        (output,) = t.forward([(slot, tree)])
        found = max(found, float((output.logits[right] - single[at - 9 : at - 5]).abs().max()))
        t.commit(slot, right)
        (output,) = t.forward([(slot, DraftTree.chain(text[at + 4]))])
        after = max(after, float((output.logits[0] - single[at - 5]).abs().max()))
        t.commit(slot, ())
    t.close(slot)
    scale = float(single.abs().max())
    with capsys.disabled():
        print(f"\n{library}: chains {own:.3f}, trees {found:.3f}, after commits {after:.3f}, at logits up to {scale:.0f}")
    assert own < 0.05 * scale
    assert found < 2 * own + 1e-3 and after < 2 * own + 1e-3
