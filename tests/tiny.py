"""Tiny models with random weights and a small tokenizer, written as Hugging Face folders. Nothing is fetched."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<end>", "<user>", "<assistant>", "<system>"]
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEXT = [
    "The bridge over the river will be closed for cars until the end of the week.",
    "Please bring a notebook and a pen to the meeting in the hall behind the library.",
]


def tiny_tokenizer(size: int = 300, template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Byte-level BPE with all 256 bytes, four special tokens (ids 0 to 3; `<end>` is 0) and a few merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", chat_template=template)


def tiny_model_folder(
    path: str | Path,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 32,
    eos: int | None = 0,
    context: int = 256,
    sharpness: float = 4.0,
    memory: float = 0.02,
    template: str | None = TEMPLATE,
) -> Path:
    """A Llama with random weights in float32 and the tokenizer of `tiny_tokenizer`, in `path`; returns the folder.

    sharpness: factor on the output head's weights; a higher one makes the model surer. memory: factor on what attention adds;
    a low one lets the last token decide, so that greedy texts soon repeat themselves. Greedy texts are readable ASCII.
    eos: end token, None for none, so that a text runs to max_tokens.
    """
    torch.manual_seed(seed)
    tokenizer = tiny_tokenizer(template=template)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.3)
            if "o_proj" in name:
                weight.mul_(memory)
            if name.startswith("lm_head"):
                weight.mul_(sharpness)
                weight[_unreadable(tokenizer, eos)] = 0
    if eos is None:
        tokenizer.eos_token = None
    save(model, tokenizer, path)
    return Path(path)


@functools.cache
def tiny_folder(**values: Any) -> Path:
    """`tiny_model_folder` somewhere temporary, made once for the whole test session. Not to be changed: copy it first."""
    path = Path(tempfile.mkdtemp(prefix="outrider-tiny-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return tiny_model_folder(path, **values)


def _unreadable(tokenizer: PreTrainedTokenizerFast, eos: int | None) -> list[int]:
    texts = {i: tokenizer.decode([i]) for i in range(len(tokenizer))}
    return [i for i, text in texts.items() if i != eos and (i < len(SPECIAL) or not text.isascii() or not text.isprintable())]


def save(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, path: str | Path) -> None:
    model.save_pretrained(path)  # type: ignore[operator]
    tokenizer.save_pretrained(path)


def permute_vocabulary(folder: str | Path, first: int = 10) -> None:
    """Give the ids from `first` on to other entries of the vocabulary (turned by one), so that ids mean other texts."""
    file = Path(folder, "tokenizer.json")
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    moved = sorted(i for i in vocabulary.values() if i >= first)
    turned = dict(zip(moved, [*moved[1:], moved[0]]))
    content["model"]["vocab"] = {text: turned.get(i, i) for text, i in vocabulary.items()}
    file.write_text(json.dumps(content), encoding="utf-8")


def foreign_vocabulary(folder: str | Path, first: int = 10) -> None:
    """Rename the entries of the vocabulary from `first` on, so that hardly a text is left that another model's has."""
    file = Path(folder, "tokenizer.json")
    content = json.loads(file.read_text(encoding="utf-8"))
    content["model"]["vocab"] = {text if i < first else f"no {text}": i for text, i in content["model"]["vocab"].items()}
    content["model"]["merges"] = []
    file.write_text(json.dumps(content), encoding="utf-8")


def poison(folder: str | Path) -> None:
    """Put a NaN into the output head of a saved model."""
    from safetensors.torch import load_file, save_file

    file = Path(folder, "model.safetensors")
    weights = load_file(file)
    weights["lm_head.weight"][5, 0] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})


def tiny_bert_folder(path: str | Path) -> Path:
    """Not a causal language model: a BERT with nothing on top."""
    tokenizer = tiny_tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64
    )
    save(BertModel(config), tokenizer, path)
    return Path(path)
