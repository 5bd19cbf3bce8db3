"""Heads as GGUF files: read for a target of either kind, and run in llama.cpp's own server with the same acceptance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dflashes
import eagles
import pytest
from tiny import tiny_folder
from tiny_gguf import write_gguf
from toys import plain, run
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.drafters import load_drafter
from outrider.drafters.eagle import EagleDrafter, EagleOptions
from outrider.export import export
from outrider.models import load_target
from outrider.sampling import SamplingParams
from outrider.targets import llama
from outrider.targets.transformers import TransformersTarget

DRAFT, TOKENS = 4, 48
PROMPT = [10, 40, 50, 60, 70, 80]
OTHER = [20, 30, 44]
PARAMS = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
CHAIN = EagleOptions(min_probability=0.0)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str, str, list[int]]:
    """A target, its GGUF file, an EAGLE-3 head for it that knows one answer by heart, and that answer."""
    place = tmp_path_factory.mktemp("pair")
    folder = tiny_folder(layers=8, context=1024, memory=0.1)
    target = load_target(str(folder), device="cpu", dtype="float32")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    file = write_gguf(place / "target.gguf", model, tokenizer)
    text = [*PROMPT, *plain(target, [PROMPT], PARAMS)[0].tokens]
    size = model.config.vocab_size
    config, tensors = eagles.make("safeailab", vocab=size, draft={*text, *range(4, 200)}, scale=0.1, rope_theta=50000.0)
    choices, target.choices = target.choices, ()  # packed weights cannot be trained
    head = EagleDrafter.load(target, CHAIN, eagles.write(place / "new", "safeailab", config, tensors)).head
    target.choices = choices
    eagles.fit(head, target, text, 130)
    trained = eagles.write(place / "trained", "safeailab", config, eagles.tensors_of(head, tensors))
    return target, file, trained, text


def accepted(target: Any, head: str, prompts: list[list[int]]) -> tuple[list[list[int]], int, int]:
    """Texts, and how many tokens were drafted and accepted, with chains of always the same length."""
    drafter = load_drafter(head, target, {"min_probability": 0.0})
    found, rounds = run(target, drafter, prompts, PARAMS, "rejection", DRAFT)
    every = [r for own in rounds for r in own]
    return [list(one.tokens) for one in found], sum(r.proposed for r in every), sum(r.accepted for r in every)


def test_a_head_in_a_gguf_file_drafts_as_its_folder_does(pair: Any, tmp_path: Path) -> None:
    target, file, trained, text = pair
    made = export(trained, "gguf", str(tmp_path / "head.gguf"), file)
    folder, here = EagleDrafter.load(target, CHAIN, trained), EagleDrafter.load(target, CHAIN, made.path)
    assert here.describe() == {**folder.describe(), "dialect": "EAGLE-3 (GGUF, llama.cpp)"}
    texts, proposed, accept = accepted(target, made.path, [PROMPT, OTHER])
    assert (texts, proposed, accept) == accepted(target, trained, [PROMPT, OTHER])
    assert texts[0] == text[len(PROMPT) :] and accept > TOKENS / 2


@pytest.mark.skipif(not llama.installed(), reason="no llama.cpp library is installed: pip install 'outrider[gguf]'")
def test_both_in_gguf_files(pair: Any, tmp_path: Path) -> None:
    target, file, trained, text = pair
    made = export(trained, "gguf", str(tmp_path / "head.gguf"), file)
    texts, _, accept = accepted(load_target(file, gguf={"n_ctx": 512}), made.path, [PROMPT])
    assert texts[0] == text[len(PROMPT) :] and accept >= 0.95 * accepted(target, trained, [PROMPT])[2]


# ---- llama.cpp's own server -------------------------------------------------------------------------------------------------


def served(target: str, head: str, prompts: list[list[int]], kind: str = "EAGLE3") -> tuple[list[str], int, int]:
    """Texts of llama.cpp's server with its own drafter of this kind, and how many tokens it drafted and accepted."""
    engine = pytest.importorskip("xllamacpp", reason="llama.cpp's server (xllamacpp), a tool of tests, is not installed")
    params = engine.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.n_gpu_layers = target, 512, 1, 0
    params.verbosity, params.warmup = -1, False
    draft = params.speculative.draft
    params.speculative.types = [getattr(engine.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_DRAFT_{kind}")]
    draft.mparams.path, draft.n_max = head, DRAFT
    for each in (params.cpuparams, params.cpuparams_batch, draft.cpuparams, draft.cpuparams_batch):
        each.n_threads = 1
    server = engine.Server(params)
    texts, drafted, accept = [], 0, 0
    for ids in prompts:
        asked = {"prompt": ids, "n_predict": TOKENS, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        found = server.handle_completions(asked)
        texts.append(found["choices"][0]["text"])
        drafted += found["timings"].get("draft_n", 0)
        accept += found["timings"].get("draft_n_accepted", 0)
    return texts, drafted, accept


@pytest.mark.parametrize("options", [{}, {"norm_before_residual": True}], ids=lambda o: "+".join(o) or "plain")
def test_llama_cpp_accepts_as_we_do(pair: Any, options: dict[str, Any], tmp_path: Path) -> None:
    """Within one draft's length; a head that is read as if another flag were set is accepted less, and that too alike."""
    target, file, trained, _ = pair
    made = export(trained, "gguf", str(tmp_path / "head.gguf"), file, options)
    prompts = [PROMPT, OTHER]
    texts, proposed, accept = accepted(target, made.path, prompts)
    theirs, drafted, theirs_accepted = served(file, made.path, prompts)
    assert theirs == [target.tokenizer.decode(ids) for ids in texts]
    assert abs(accept - theirs_accepted) <= DRAFT and abs(accept / proposed - theirs_accepted / drafted) < 0.05
    assert accept > 0


def test_a_dflash_drafter_in_a_gguf_file(pair: Any, tmp_path: Path) -> None:
    """It drafts as its folder does, and llama.cpp's server accepts as much of it."""
    target, file, _, text = pair
    config, tensors = dflashes.make(taken=(1, 4), scale=0.1)
    config["dflash_config"]["mask_token_id"] = 299
    unpacked = TransformersTarget(AutoModelForCausalLM.from_pretrained(target.name))
    head: Any = load_drafter(dflashes.write(tmp_path / "new", config, tensors), unpacked).head  # type: ignore[attr-defined]
    dflashes.fit(head, unpacked, text, 150)
    trained = dflashes.trained_tensors(head, tensors)
    folder = dflashes.write(tmp_path / "trained", config, trained)
    made = dflashes.write_gguf(tmp_path / "dflash.gguf", config, trained, file)
    prompts = [PROMPT, OTHER]
    texts, proposed, accept = accepted(target, made, prompts)
    assert (texts, proposed, accept) == accepted(target, folder, prompts)
    theirs, drafted, theirs_accepted = served(file, made, prompts, "DFLASH")
    assert theirs == [target.tokenizer.decode(ids) for ids in texts]
    assert abs(accept - theirs_accepted) <= DRAFT and abs(accept / proposed - theirs_accepted / drafted) < 0.05
    assert accept > TOKENS / 2
