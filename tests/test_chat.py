"""Tools and reasoning: what is asked of a chat template, what an answer is held to, and reading whatever the chunks."""

from __future__ import annotations

import itertools
import json
from typing import Any, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_tokenizer

from outrider.chat import DIALECTS, END_THINK, THINK, Piece, Reader, ToolCall, Tools, abilities
from outrider.errors import ParameterError
from outrider.targets.hf_tokenizer import HFTokenizer

TOOL = (
    '{{ "# Tools" }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}'
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for call in m.tool_calls or [] %}{% set f = call.function %}CALL"
    "{% endfor %}<end>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALLS = {
    "Hermes": '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>',
    "Hermes, arguments first": '<tool_call>\n{"arguments": {{ f.arguments | tojson }}, "name": "{{ f.name }}"}\n</tool_call>',
    "Hermes, text": '<tool_call>{"name": "{{ f.name }}", "arguments": {{ f.arguments + "" }}}</tool_call>',
    "Mistral": '[TOOL_CALLS] [{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, "id": "{{ call.id }}"}]',
    "Llama 3": '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
}
OTHERS = {
    "XML": "<tool_call>\n<function={{ f.name }}>\n<parameter=place>\nx\n</parameter>\n</function>\n</tool_call>",
    "keys": "<tool_call>{{ f.name }}\n<arg_key>place</arg_key><arg_value>x</arg_value></tool_call>",
    "calls are not shown": "",
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather somewhere",
        "parameters": {
            "type": "object",
            "properties": {"place": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["place"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "time"}}


def tokenizer(kind: str = "Hermes", more: str = "") -> HFTokenizer:
    return HFTokenizer(tiny_tokenizer(template=TOOL.replace("CALL", {**CALLS, **OTHERS}[kind]) + more))


def dialect(name: str) -> Any:
    return next(d for d in DIALECTS if d.name == name)


# ---- templates -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CALLS)
def test_the_dialect_is_asked_of_the_template(kind: str) -> None:
    found = abilities(tokenizer(kind))
    assert found.dialect is not None and found.dialect.name == kind.split(",")[0]
    assert found.arguments_as_text == ("text" in kind) and not found.thinks
    assert abilities(tokenizer(kind, "{# </think> #}")).thinks


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_not_understood_is_refused_by_name(kind: str) -> None:
    with pytest.raises(ParameterError, match=r"^tools: this model's chat template has none .*Hermes, Mistral, Llama 3"):
        Tools.of(tokenizer(kind), [WEATHER])


def test_a_template_without_tools_is_refused() -> None:
    plain = HFTokenizer(tiny_tokenizer())
    with pytest.raises(ParameterError, match=r"^tools: this model's chat template"):
        Tools.of(plain, [WEATHER])
    assert Tools.of(plain).definitions == ()
    assert Tools.of(HFTokenizer(tiny_tokenizer(template=None))).names == ()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tools": None, "choice": "required"}, "tool_choice is 'required', but there are no tools"),
        ({"tools": [{"type": "web_search"}]}, "tools must hold functions"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools: a function has no name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "the parameters of 'f'"),
        ({"tools": [TIME, TIME]}, "two have the same name"),
        ({"tools": [TIME], "choice": "always"}, "tool_choice must be"),
        ({"tools": [TIME], "choice": {"type": "function"}}, "tool_choice must name a function"),
        ({"tools": [TIME], "choice": {"type": "function", "function": {"name": "g"}}}, "names 'g', but the tools are time"),
    ],
)
def test_tools_that_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        Tools.of(tokenizer(), **values)


def test_tools_and_calls_of_earlier_turns_are_in_the_prompt() -> None:
    t = tokenizer()
    call = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Rome"}'}}
    turns = [
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "content": "rain"},
    ]
    text = t.decode(Tools.of(t, [WEATHER]).prompt(turns))
    assert '"description": "The weather somewhere"' in text and '"arguments": {"place": "Rome"}}\n</tool_call>' in text
    assert "The weather" not in t.decode(Tools.of(t, [WEATHER], "none").prompt(turns))
    call["function"] = {"name": "weather", "arguments": "{"}  # type: ignore[assignment]
    with pytest.raises(ParameterError, match="arguments of a call are not JSON"):
        Tools.of(t, [WEATHER]).prompt(turns)


# ---- reading ---------------------------------------------------------------------------------------------------------------


def merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Neighbours of one kind as one piece."""
    made: list[Piece] = []
    for piece in pieces:
        if made and piece.kind == made[-1].kind != "call":
            made[-1] = Piece(piece.kind, made[-1].text + piece.text)
        else:
            made.append(piece)
    return made


def read(chunks: Sequence[str], *args: Any, **kwargs: Any) -> list[Piece]:
    reader = Reader(*args, **kwargs)
    return merged([*(piece for chunk in chunks for piece in reader.push(chunk)), *reader.close()])


def call(name: str, **arguments: Any) -> Piece:
    return Piece("call", call=ToolCall(name, json.dumps(arguments, ensure_ascii=False)))


def said(text: str) -> Piece:
    return Piece("content", text)


def thought(text: str) -> Piece:
    return Piece("reasoning", text)


ROME = '{"name": "weather", "arguments": {"place": "Rome"}}'
NAMES = ("weather", "time")
CASES: list[tuple[str, str, dict[str, Any], list[Piece]]] = [
    ("Hermes", "Hello there.\n", {}, [said("Hello there.\n")]),
    ("Hermes", f"\n<tool_call>\n{ROME}\n</tool_call>\n", {}, [call("weather", place="Rome")]),
    (
        "Hermes",
        f"Let me see.\n<tool_call>{ROME}</tool_call>\n<tool_call>\n" + '{"name": "time"}\n</tool_call> done ',
        {},
        [said("Let me see."), call("weather", place="Rome"), call("time"), said(" done")],
    ),
    ("Hermes", f"<tool_call>{ROME}", {}, [call("weather", place="Rome")]),
    ("Hermes", '<tool_call>{"name": "wea', {}, [said('<tool_call>{"name": "wea')]),
    ("Hermes", "<tool_call>nonsense</tool_call> so", {}, [said("<tool_call>nonsense</tool_call> so")]),
    (
        "Hermes",
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
        {},
        [said('<tool_call>{"name": "other", "arguments": {}}</tool_call>')],
    ),
    ("Hermes", f" {ROME}\n", {}, [call("weather", place="Rome")]),
    ("Hermes", '{"name": "Bob"} is JSON', {}, [said('{"name": "Bob"} is JSON')]),
    ("Hermes", "a < b <tool> <tool_cal", {}, [said("a < b <tool> <tool_cal")]),
    (
        "Hermes",
        '<tool_call>{"name": "time", "arguments": {"zone": "a</tool_call>b", "n": "x\ny"}}</tool_call>',
        {},
        [call("time", zone="a</tool_call>b", n="x\ny")],
    ),
    ("Hermes", '<tool_call>{"name": "time", "arguments": "{\\"n\\": 1}"}</tool_call>', {}, [call("time", n=1)]),
    (
        "Hermes",
        f"<think>\nHm. <tool_call> or not?\n</think>\n\n<tool_call>\n{ROME}\n</tool_call>",
        {"thinks": True},
        [thought("Hm. <tool_call> or not?"), call("weather", place="Rome")],
    ),
    ("Hermes", "  \n<think>\n\n</think>\n\nYes. </think>", {"thinks": True}, [said("Yes. </think>")]),
    (
        "Hermes",
        "so </think> text <tool_call>" + ROME + "</tool_call>",
        {"thinks": True, "inside": True},
        [thought("so"), said("text"), call("weather", place="Rome")],
    ),
    ("Hermes", "never ends </thi", {"thinks": True, "inside": True}, [thought("never ends </thi")]),
    ("Hermes", "<think>no reasoning here</think>", {}, [said("<think>no reasoning here</think>")]),
    ("Hermes", "  an answer <think> later", {"thinks": True}, [said("  an answer <think> later")]),
    ("Mistral", f"[TOOL_CALLS][{ROME}, {ROME}]", {}, [call("weather", place="Rome")] * 2),
    ("Mistral", f"  [{ROME}] ", {}, [call("weather", place="Rome")]),
    (
        "Mistral",
        f'I look. [TOOL_CALLS] [{ROME[:-1]}, "id": "abcdefghi"}}]',
        {},
        [said("I look."), call("weather", place="Rome")],
    ),
    ("Mistral", "[1, 2] is a list", {}, [said("[1, 2] is a list")]),
    ("Mistral", "[TOOL_CALLS] [", {}, [said("[TOOL_CALLS] [")]),
    ("Llama 3", '{"name": "weather", "parameters": {"place": "Rome"}}', {}, [call("weather", place="Rome")]),
    ("Llama 3", '\n{"name": "time", "parameters": {}}; {"name": "time"}\n', {}, [call("time"), call("time")]),
    ("Llama 3", '{"type": "function", "name": "time", "parameters": {}}', {}, [call("time")]),
    ("Llama 3", '{"name": "Bob", "age": 4}', {}, [said('{"name": "Bob", "age": 4}')]),
    ("Llama 3", '{"answer": 4} ', {}, [said('{"answer": 4} ')]),
    ("Llama 3", " plain text", {}, [said(" plain text")]),
    ("", "<tool_call>" + ROME + "</tool_call> ", {}, [said("<tool_call>" + ROME + "</tool_call> ")]),
    ("", "<think> a </think> b ", {"thinks": True}, [thought("a"), said("b ")]),
    ("Hermes", "", {}, []),
    ("Hermes", " \n", {}, [said(" \n")]),
]


@pytest.mark.parametrize(("name", "text", "options", "wanted"), CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)])
def test_whatever_the_chunks(name: str, text: str, options: dict[str, Any], wanted: list[Piece]) -> None:
    args = (dialect(name) if name else None, NAMES)
    assert read([text], *args, **options) == wanted
    for size in (1, 2, 3, 7):
        chunks = [text[at : at + size] for at in range(0, len(text), size)]
        assert read(chunks, *args, **options) == wanted, size


PARTS = [
    THINK,
    END_THINK,
    "<tool_call>",
    "</tool_call>",
    ROME,
    "\n",
    " ",
    "a",
    "<",
    "[TOOL_CALLS]",
    "[",
    "]",
    '{"name": "time"}',
    "é",
    "</",
]


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from([*DIALECTS, None]),
    st.lists(st.sampled_from(PARTS), max_size=9).map("".join),
    st.lists(st.integers(0, 60), max_size=8),
    st.booleans(),
    st.booleans(),
)
def test_any_text_in_any_chunks(which: Any, text: str, cuts: list[int], thinks: bool, inside: bool) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    chunks = [text[a:b] for a, b in itertools.pairwise(places)]
    options = {"thinks": thinks, "inside": thinks and inside}
    whole = read([text], which, NAMES, **options)
    assert read(chunks, which, NAMES, **options) == whole
    assert read(list(text), which, NAMES, **options) == whole
    if not any(piece.kind == "call" for piece in whole):  # nothing is lost but markers of reasoning and whitespace
        shown = "".join(piece.text for piece in whole)
        assert bare(shown) == bare(text) if thinks else "".join(shown.split()) == "".join(text.split())


def bare(text: str) -> str:
    """Without markers of reasoning and whitespace."""
    return "".join(text.replace(THINK, "").replace(END_THINK, "").split())


def test_content_is_not_held_back_longer_than_needed() -> None:
    reader = Reader(dialect("Hermes"), NAMES)
    assert reader.push("Hello") == [said("Hello")]
    assert reader.push(" <tool") == [] and reader.push("s>") == [said(" <tools>")]


# ---- calls that must be ------------------------------------------------------------------------------------------------------


def follows(t: HFTokenizer, lark: str, text: str) -> bool:
    """Whether `text` matches the grammar, from start to end."""
    from outrider.grammar import Grammar, Grammars

    matcher = Grammars(t, t.size).matcher(Grammar("lark", lark), frozenset((0,)))
    mask = matcher.mask(t.encode_plain(text))
    return mask is not None and bool(mask[0])


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (
            "Hermes",
            ['<tool_call>\n{"name": "weather", "arguments": {"place": "Rome", "days": 3}}\n</tool_call>'],
            ["", "Hello", "{}"],
        ),
        ("Mistral", ['[TOOL_CALLS][{"name": "weather", "arguments": {"place":"Oslo"}}]'], ["[TOOL_CALLS][]", "[]"]),
        (
            "Llama 3",
            ['{"name": "weather", "parameters": {"place": "Oslo"}}'],
            ['{"name": "weather", "parameters": {}}', "Oslo"],
        ),
    ],
)
def test_a_wanted_call_is_held_to_its_schema(kind: str, good: list[str], bad: list[str]) -> None:
    pytest.importorskip("llguidance")
    t = tokenizer(kind)
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        tools = Tools.of(t, [WEATHER, TIME], choice)
        lark = tools.grammar([])
        assert lark is not None
        for text in good:
            assert follows(t, lark, text), text
            assert [p.kind for p in read([text], tools.can.dialect, tools.names)] == ["call"]
        for text in [*bad, good[0].replace("Rome", "Paris").replace("Oslo", "Paris"), good[0] + " and more"]:
            assert not follows(t, lark, text), text
        free = good[0].replace("weather", "time").replace("Rome", "anywhere").replace("Oslo", "anywhere")
        assert follows(t, lark, free) == (choice == "required")
    assert Tools.of(t, [WEATHER]).grammar([]) is None


def test_markers_that_are_special_tokens() -> None:
    """A special token has no text: the grammar asks for the token itself, and the answer is read without it."""
    pytest.importorskip("llguidance")
    for kind, markers in (("Mistral", ["[TOOL_CALLS]"]), ("Hermes", ["<tool_call>", "</tool_call>"])):
        made = tiny_tokenizer(template=TOOL.replace("CALL", CALLS[kind]))
        made.add_special_tokens({"additional_special_tokens": markers})
        t = HFTokenizer(made)
        tools = Tools.of(t, [WEATHER], "required")
        lark = tools.grammar([])
        text = made.decode(
            t.encode_plain(
                made.apply_chat_template(
                    [
                        {
                            "role": "assistant",
                            "content": "",
                            "tool_calls": [{"function": {"name": "weather", "arguments": {"place": "Rome"}}}],
                        }
                    ],
                    tokenize=False,
                )
            )
        )
        call_text = (
            text[text.index(markers[0]) : text.rindex("<end>")]
            .replace(', "id": ""', "")
            .replace("[TOOL_CALLS] ", "[TOOL_CALLS]")
        )
        assert lark is not None and follows(t, lark, call_text), call_text
        shown = t.decode(t.encode_plain(call_text))
        assert markers[0] not in shown
        reader = tools.reader([])
        assert [*reader.push(shown), *reader.close()] == [call("weather", place="Rome")]
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    with pytest.raises(ParameterError, match="strict needs a tool_choice"):
        Tools.of(t, [strict])


def test_several_calls_only_where_wanted() -> None:
    pytest.importorskip("llguidance")
    t = tokenizer()
    one = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    for parallel, choice, several in ((True, "required", True), (False, "required", False)):
        lark = Tools.of(t, [TIME], choice, parallel).grammar([])
        assert lark is not None and follows(t, lark, one) and follows(t, lark, f"{one}\n{one}") == several


def test_a_wanted_call_may_come_after_reasoning() -> None:
    pytest.importorskip("llguidance")
    t = tokenizer("Hermes", "{# </think> #}{% if add_generation_prompt %}{% if think %}<think>{% endif %}{% endif %}")
    one = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    tools = Tools.of(t, [TIME], "required")
    lark = tools.grammar(t.encode_plain("hello"))
    assert lark is not None and follows(t, lark, one) and follows(t, lark, f"<think>\nwell < that\n</think>\n\n{one}")
    assert not follows(t, lark, f"well</think>{one}")
    inside = t.encode_plain("hello<think>\n")
    lark = tools.grammar(inside)
    assert lark is not None and follows(t, lark, f"well</think>\n{one}") and not follows(t, lark, one)
    reader = tools.reader(inside)
    assert merged([*reader.push(f"well</think>\n{one}"), *reader.close()]) == [thought("well"), call("time")]


def test_strict_tools_are_held_to_their_schema_wherever_they_are_called() -> None:
    pytest.importorskip("llguidance")
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    t = tokenizer()
    tools = Tools.of(t, [strict, TIME])
    lark = tools.grammar([])
    good = '<tool_call>\n{"name": "weather", "arguments": {"place": "Rome"}}\n</tool_call>'
    assert lark is not None
    for text in ("Hello there.", good, f"I look.\n{good}\n{good}", f"{good} So."):
        assert follows(t, lark, text), text
    assert not follows(t, lark, good.replace("Rome", "Paris"))
    with pytest.raises(ParameterError, match="strict needs a tool_choice"):
        Tools.of(tokenizer("Llama 3"), [strict])


def test_one_call_at_most_where_that_is_asked() -> None:
    pytest.importorskip("llguidance")
    t = tokenizer()
    lark = Tools.of(t, [TIME], "auto", False).grammar([])
    one = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    assert lark is not None and follows(t, lark, "Hello.") and follows(t, lark, f"I look.\n{one}")
    assert not follows(t, lark, f"{one}\n{one}")
    with pytest.raises(ParameterError, match=r"^parallel_tool_calls: false needs"):
        Tools.of(tokenizer("Mistral"), [TIME], "auto", False)


def test_references_within_a_schema() -> None:
    pytest.importorskip("llguidance")
    t = tokenizer()
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/n"}},
        "$defs": {"n": {"type": "integer"}},
        "required": ["a"],
    }
    lark = Tools.of(t, [{"type": "function", "function": {"name": "f", "parameters": schema}}], "required").grammar([])
    assert lark is not None and follows(t, lark, '<tool_call>\n{"name": "f", "arguments": {"a": 5}}\n</tool_call>')
    assert not follows(t, lark, '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>')
