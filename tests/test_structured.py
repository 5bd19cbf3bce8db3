"""Structured output on real tokenizers: always valid, and equal to constrained plain decoding, with any drafter."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import schemas
from ties import Ledger
from tiny import TEMPLATE, tiny_folder
from tiny_gguf import write_gguf
from toys import Scripted, Whatever, run
from typer.testing import CliRunner

import outrider
from outrider import models
from outrider.cli import app
from outrider.drafters import Drafter, NoDrafter, load_drafter
from outrider.drafters.model import ModelDrafter, ModelOptions
from outrider.drafters.vocabulary import token_bytes
from outrider.grammar import Grammars
from outrider.params import SamplingParams
from outrider.targets.base import Target
from outrider.tree import DraftTree

pytest.importorskip("llguidance")
jsonschema_rs = pytest.importorskip("jsonschema_rs")

SMOL = models.folder("smollm2")
PLACES = [models.directory() / name for name in ("smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct")]
FORMATS = {"ignore_unknown_formats": False}


def target(dtype: str = "float64", **values: Any) -> Any:
    return outrider.load_target(str(tiny_folder(context=2048, **values)), device="cpu", dtype=dtype)


def check(schema: dict[str, Any], text: str) -> None:
    jsonschema_rs.Draft202012Validator(schema, validate_formats=True).validate(json.loads(text))


def junk(t: Target, seed: int) -> Whatever:
    """Drafts of tokens at random, most of them illegal."""
    rng = random.Random(seed)
    return Whatever(lambda tokens, budget, times: DraftTree.chain(tokens[-1], rng.choices(range(t.vocab_size), k=4)))


# ---- tokenizers ------------------------------------------------------------------------------------------------------------


def gguf_target(tmp_path: Path) -> Target:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from outrider.targets import llama

    if not llama.installed():
        pytest.skip("no llama.cpp library is installed: pip install 'outrider[gguf]'")
    folder = tiny_folder(context=2048)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    return outrider.load_target(write_gguf(tmp_path / "tiny.gguf", model, tokenizer, 0, TEMPLATE))


def check_bytes(tokenizer: Any) -> None:
    """What a grammar takes for a token's text is what it adds to a text."""
    known, rng = token_bytes(tokenizer), random.Random(0)
    plain = [t for t in known if t not in tokenizer.special]
    context = tokenizer.encode_plain("so")
    for _ in range(300):
        tokens = rng.choices(plain, k=rng.randint(1, 6))
        text = tokenizer.decode([*context, *tokens])
        assert text == (b"so" + b"".join(known[t] for t in tokens)).decode("utf-8", "replace"), tokens
    for token in tokenizer.special:
        assert tokenizer.decode([*context, token, *context]) == "soso"


def test_bytes_of_tokens() -> None:
    check_bytes(target().tokenizer)


def test_bytes_of_tokens_of_a_gguf_file(tmp_path: Path) -> None:
    check_bytes(gguf_target(tmp_path).tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_bytes_of_tokens_of_a_real_model(place: Path) -> None:
    if not (place / "tokenizer.json").exists():
        pytest.skip(f"no {place}")
    from transformers import AutoTokenizer

    from outrider.targets.hf_tokenizer import HFTokenizer

    check_bytes(HFTokenizer(AutoTokenizer.from_pretrained(place)))


def test_forced_tokens_are_the_tokenizers_own() -> None:
    """What must come is drafted in the tokens that the tokenizer writes it with."""
    t = target()
    matcher = Grammars(t.tokenizer, t.vocab_size).matcher(
        SamplingParams(choices=("bridge over the river",)).grammar,  # type: ignore[arg-type]
        t.eos,
    )
    first = t.tokenizer.encode_plain("bri")
    forced = matcher._forced(first)
    assert len(forced) > 2 and "bridge over the river".startswith(t.tokenizer.decode([*first, *forced]))


# ---- schemas ---------------------------------------------------------------------------------------------------------------

PROMPT = "Please bring a notebook and a pen to the meeting in the hall behind the library."
SAMPLINGS: list[tuple[str, dict[str, Any]]] = [
    ("rejection", {}),
    ("coupled", {"temperature": 1.0, "seed": 3}),
    ("coupled", {"temperature": 1.7, "seed": 4, "top_p": 0.95, "repetition_penalty": 1.2}),
    ("block", {"temperature": 1.0}),
]


def drafters(t: Target, small: Target, script: list[int], number: int) -> dict[str, Drafter]:
    return {
        "none": NoDrafter(),
        "suffix": load_drafter("suffix", t),
        "junk": junk(t, number),
        "model": ModelDrafter(small, ModelOptions()),
        "greedy model": ModelDrafter(small, ModelOptions(greedy=True)),
        "illegal at an offset": Scripted([[*script, *script[:5]]], wrong_at=number // 4 % 5, shift=7),
    }


@pytest.fixture(scope="module")
def tiny() -> tuple[Target, Target]:
    return target(), target(seed=1)


@pytest.mark.parametrize("number", range(20))
def test_schemas_on_a_tiny_model(tiny: tuple[Target, Target], number: int) -> None:
    """Exactly, in float64: greedy and coupled equal constrained plain decoding; block is valid, too."""
    t, small = tiny
    schema = schemas.make(number)
    prompt = t.tokenizer.encode(PROMPT)[number:]  # type: ignore[union-attr]
    rule, values = SAMPLINGS[number % 4]
    params = SamplingParams(max_tokens=900, json_schema=json.dumps(schema), **values)
    (wanted,), _ = run(t, NoDrafter(), [prompt], params, rule, 0)
    assert wanted.finish == "stop", wanted.text
    check(schema, wanted.text)
    every = drafters(t, small, [*prompt, *wanted.tokens], number)
    for name in ("illegal at an offset", list(every)[number % 5]):
        drafter = every[name]
        (found,), rounds = run(t, drafter, [prompt], params, rule, 5)
        check(schema, found.text)
        if rule != "block":
            assert found == wanted, name
        if name == "illegal at an offset" and rule != "block":
            assert len(rounds[0]) < len(wanted.tokens)


def test_schemas_in_a_batch(tiny: tuple[Target, Target]) -> None:
    """Sequences with schemas of their own, and without, decoded together."""
    t, _ = tiny
    prompts = [t.tokenizer.encode(PROMPT)[i:] for i in range(5)]  # type: ignore[union-attr]
    params = [
        SamplingParams(max_tokens=900, seed=i, temperature=0.9, json_schema=json.dumps(schemas.make(i)) if i != 2 else None)
        for i in range(5)
    ]
    params[2] = replace(params[2], max_tokens=40)
    wanted = [run(t, NoDrafter(), [p], q, "coupled", 0)[0][0] for p, q in zip(prompts, params)]
    found, _ = run(t, load_drafter("suffix", t), prompts, params, "coupled", 6)
    assert found == wanted
    for number, outcome in enumerate(found):
        if number != 2:
            check(schemas.make(number), outcome.text)


@pytest.mark.parametrize("number", range(4))
def test_schemas_on_a_gguf_file(tmp_path: Path, number: int) -> None:
    t = gguf_target(tmp_path)
    schema = schemas.make(number)
    for drafter in (NoDrafter(), load_drafter("suffix", t), junk(t, number)):
        engine = outrider.Engine(t, drafter, 5)
        result = engine.generate(PROMPT, max_tokens=900, json_schema=schema, temperature=0.8, seed=number)
        assert result.finish_reason == "stop"
        check(schema, result.text)


QUESTIONS = ["Describe a person.", "Tell me about a shop in Oslo.", "Invent a record.", "What is on the table?"]


@pytest.fixture(scope="module")
def smol() -> Target:
    if not (SMOL / "config.json").exists():
        pytest.skip(f"no {SMOL}: run `outrider models get smollm2`")
    return outrider.load_target(str(SMOL), device="cpu", dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_schemas_on_smollm2(smol: Target, part: int, capsys: pytest.CaptureFixture[str]) -> None:
    """20 of 200 schemas and prompts, greedy and coupled: valid, and equal to constrained plain decoding but for ties."""
    ledger, suffix = Ledger(smol), load_drafter("suffix", smol)
    drafted = accepted = passes = emitted = 0
    for number in range(20 * part, 20 * part + 20):
        schema = schemas.make(number)
        question = f"{QUESTIONS[number % 4]} Answer in JSON of this schema: {json.dumps(schema)}"
        prompt = smol.tokenizer.chat([{"role": "user", "content": question}])  # type: ignore[union-attr]
        rule, values = SAMPLINGS[number % 3]
        params = SamplingParams(max_tokens=900, json_schema=json.dumps(schema), **values)
        (wanted,), _ = run(smol, NoDrafter(), [prompt], params, rule, 0)
        script = [[*prompt, *wanted.tokens, *prompt[:9]]]
        drafter = [suffix, Scripted(script, wrong_at=number % 5, shift=11), junk(smol, number), NoDrafter()][number // 3 % 4]
        (found,), rounds = run(smol, drafter, [prompt], params, rule, 5)
        for outcome in (wanted, found):
            assert outcome.finish == "stop", outcome.text
            check(schema, outcome.text)
        ledger.compare(f"schema {number}", prompt, wanted.tokens, found.tokens, params)
        drafted += sum(r.proposed for r in rounds[0])
        accepted += sum(r.accepted for r in rounds[0])
        passes, emitted = passes + len(rounds[0]), emitted + len(found.tokens)
    with capsys.disabled():
        print(f"\n  {ledger}\n  {accepted} of {drafted} drafted tokens accepted; {emitted} tokens in {passes} passes")


# ---- the command line ------------------------------------------------------------------------------------------------------


def outrider_run(*arguments: str) -> Any:
    folder = str(tiny_folder(context=2048))
    return CliRunner().invoke(app, ["run", "-t", folder, "--dtype", "float32", "hello", *arguments])


def test_the_command_line(tmp_path: Path) -> None:
    schema = schemas.make(1)
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    (tmp_path / "grammar.lark").write_text('start: "a" start "b" | "cc"')
    done = outrider_run("--json-schema", str(tmp_path / "schema.json"), "--max-tokens", "900")
    assert done.exit_code == 0, done.output
    check(schema, done.stdout)
    done = outrider_run("--lark", str(tmp_path / "grammar.lark"))
    assert done.stdout.replace("a", "").replace("b", "") == "cc"
    assert outrider_run("--choice", "red", "--choice", "blue").stdout in ("red", "blue")
    assert outrider_run("--regex", "[0-9]{3}x").stdout[3] == "x"
    assert outrider_run("--json-object", "--max-tokens", "30").stdout.startswith("{")


def test_mistakes_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text("{")
    for arguments, message in (
        (("--json-schema", str(tmp_path / "schema.json")), "json_schema is not JSON"),
        (("--json-schema", str(tmp_path / "none.json")), "--json-schema: cannot read"),
        (("--regex", "(", "--choice", "a"), "regex and choices cannot be given together"),
        (("--regex", "("), "regex cannot be used"),
    ):
        done = outrider_run(*arguments)
        assert done.exit_code == 2 and message in done.stderr and "Traceback" not in done.stderr
