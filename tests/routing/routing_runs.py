"""Runs of models and texts that mean no good, or have as many layers as a question needs."""

from __future__ import annotations

from pathlib import Path

from families.tiny_models import SIZES
from moescope.routing.trace import trace
from moescope.run import Run
from routing.tiny_text import WORDS, save_model, texts, write_jsonl

BIDI = "\u202egnp.exe\u2066"
EVIL = [
    "<script>window.hacked=1</script>",
    "</script><img/src=x/onerror=window.hacked=2>",
    "-->",
    "<!--",
    "<b>bold</b>",
    "&lt;i&gt;",
    "{{7*7}}",
    "%{x}",
    "\\u003cscript>",
    "'\"`${window.hacked=3}",
    BIDI,
    "\u200b",
]
EVIL_DOMAIN = "<img/src>&amp;%{x}"


def save_evil_tokenizer(folder: Path) -> None:
    """Words between blanks, some of them written to break a page."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<s>", "</s>", "<unk>", *EVIL, *WORDS[:48]]
    tokenizer = Tokenizer(
        models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)


def evil_run(folder: Path) -> Run:
    """A trace of documents that are all attack, in a domain and a folder of evil names."""
    model = save_model(folder / "<b>model&amp;", tokenizer=False)
    save_evil_tokenizer(model)
    evil = write_jsonl(
        folder / "evil.jsonl", [" ".join(EVIL[turn:] + EVIL[:turn]) for turn in range(len(EVIL))] * 2
    )
    plain = write_jsonl(folder / "plain.jsonl", texts(24, seed=3, words=40))
    domains = [f"{EVIL_DOMAIN}={evil}", f"plain={plain}"]
    return trace(model, domain=domains, out=folder / "run", save_tokens=True, quiet=True)


def deep_model(folder: Path, layers: int = 6) -> Path:
    """A model of as many MoE layers as the questions over layers need."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    from routing.tiny_text import save_tokenizer

    torch.manual_seed(0)
    names = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "num_local_experts",
    )
    model = MixtralForCausalLM(
        MixtralConfig(**{name: SIZES[name] for name in names}, num_hidden_layers=layers, pad_token_id=0)
    )
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder
