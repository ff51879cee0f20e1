"""Models loaded by transformers, ready to be run over documents."""

from __future__ import annotations

import logging as python_logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from traceback import walk_tb
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from moescope.checkpoint import Checkpoint
from moescope.checkpoint.files import FLOAT_DTYPES
from moescope.decoder.replacement import KEY
from moescope.errors import BadInput
from moescope.execution.adapters import find_blocks, hands_out_routing
from moescope.execution.capture import check_transformers
from moescope.execution.chat_templates import ChatTemplate
from moescope.execution.documents import WINDOW
from moescope.execution.model_names import checked_checkpoint
from moescope.execution.replaced import replaced_classes
from moescope.processor import avoid_broken_amx
from moescope.types import Integers

HALF = (torch.bfloat16, torch.float16)
TRUST = "read it, and pass --trust-remote-code if you trust it"
CODE_NEEDED = f"is defined by Python code inside the checkpoint, which moescope does not run; {TRUST}"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
GIVE_IDS = "give token ids with --token-ids FILE"
DEFECT = "holds NaN or Inf, so nothing was run; fix the checkpoint, or download it again"
MOST_GROWTH = 2  # parameters that a config may describe per stored one: some are computed when loading
HEAD_TOKENS = 1024  # positions whose logits over the vocabulary exist at once


@dataclass
class TracedModel:
    """A model ready to be run, with its tokenizer if it has one."""

    name: str
    model: Any
    runner: Any  # the part with every MoE block but no head: logits over the vocabulary are large
    tokenizer: Any
    device: str
    no_tokenizer: str = f"the model has no tokenizer; {GIVE_IDS}"  # why there is none, and what to do

    by_layer: ClassVar[bool] = False  # whether layers have weights only while they are used

    @property
    def config(self) -> Any:
        return self.model.config

    def layer_loaded(self, layer: int) -> AbstractContextManager[None]:
        """Return a context in which the MoE layer of that number has its weights."""
        return nullcontext()

    def change_layers(self, change: Callable[[int], None]) -> None:
        """Call `change` with the number of every MoE layer, to change its weights while they are there."""
        for block in find_blocks(self.model):
            change(block.layer)

    def run_all(self, inputs: Sequence[dict[str, Any]]) -> Iterator[Any]:
        """Yield the whole model's output, logits included, for each of the inputs."""
        for each in inputs:
            with torch.no_grad(), named_failures(self):
                yield self.model(**each)

    def encode(self, text: str) -> list[int]:
        """Return the text's token ids."""
        try:
            return list(self.tokenizer(text, verbose=False)["input_ids"])
        except Exception as error:  # a tokenizer raises what it likes, such as for an unknown word
            raise BadInput(
                f"{self.name}: its tokenizer cannot read the text ({cause(error)}); {GIVE_IDS}"
            ) from None

    @cached_property
    def chat_template(self) -> ChatTemplate:
        return ChatTemplate(self.name, self.tokenizer)

    @property
    def two_stacks(self) -> bool:
        return bool(self.config.is_encoder_decoder)

    @property
    def window(self) -> int:
        """Tokens per window: as many as the model has positions for, 4,096 at most."""
        text = self.config.get_text_config()
        longest = getattr(text, "max_position_embeddings", None) or getattr(text, "max_seq_len", None)
        return min(WINDOW, int(longest or WINDOW))

    @property
    def padding(self) -> int:
        """The id to pad with; its value does not matter, since padding is masked."""
        padding = getattr(self.tokenizer, "pad_token_id", None)
        if padding is None:
            padding = getattr(self.config.get_text_config(), "pad_token_id", None)
        return int(padding or 0)

    @property
    def vocabulary(self) -> int:
        return int(self.config.get_text_config().vocab_size)


Traced = TypeVar("Traced", bound=TracedModel)


@dataclass(frozen=True)
class ModelSource:
    """A model to load: its place, its config and class in transformers, and its checkpoint if readable."""

    name: str
    path: str
    more: dict[str, Any]  # revision and trust, as transformers takes them
    config: Any
    kind: Any
    checkpoint: Checkpoint | None

    def precision(self, dtype: str) -> torch.dtype:
        """Return the precision to compute in; auto: of the config, else as stored."""
        if dtype != "auto":
            return getattr(torch, dtype)
        for config in (self.config, self.config.get_text_config()):
            if isinstance(known := getattr(config, "dtype", None), torch.dtype):
                return known
        stored = Counter(info.dtype for info in (self.checkpoint.tensors if self.checkpoint else {}).values())
        common = next((kind for kind, _ in stored.most_common() if kind in FLOAT_DTYPES.values()), "F32")
        return getattr(torch, next(name for name, kind in FLOAT_DTYPES.items() if kind == common)[6:])


def find_model(name: str, trust_remote_code: bool = False) -> ModelSource:
    """Return what there is to load of a folder or hub id (owner/name, owner/name@revision); reads no weight.

    Python inside the checkpoint runs only with `trust_remote_code`.
    """
    check_transformers()
    from transformers import AutoConfig

    path, _, revision = name.partition("@") if not name.startswith((".", "/")) else (name, "", "")
    more: dict[str, Any] = {"revision": revision} if revision else {}
    more["trust_remote_code"] = trust_remote_code
    checkpoint = checked_checkpoint(name)
    with loading(name):
        if checkpoint is not None and KEY in (checkpoint.config or {}):
            config, kind = replaced_classes(path, checkpoint.config or {})
            more["trust_remote_code"] = (
                False  # moescope's classes are used; code in the checkpoint is never run
            )
        else:
            config = AutoConfig.from_pretrained(path, **more)
            kind = model_class(config, trust_remote_code)
        if not trust_remote_code:
            check_no_hub_code(name, config)
        if checkpoint is not None:
            check_sizes(kind, config, checkpoint)
    return ModelSource(name, path, more, config, kind, checkpoint)


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Turn what transformers raises on a damaged config or file into one line."""
    with quiet_transformers():
        try:
            yield
        except BadInput:
            raise
        except Exception as error:
            if needs_code(error):
                raise BadInput(f"{name}: the model {CODE_NEEDED}") from None
            raise BadInput(
                f"{name}: transformers cannot load it ({cause(error)}); check config.json and the weights, "
                "or give another model folder or hub id"
            ) from None


def load_model(
    name: str,
    dtype: str,
    device: str,
    trust_remote_code: bool = False,
    placement: dict[str, Any] | None = None,
) -> TracedModel:
    """Load a model and its tokenizer onto one device, or as accelerate's `placement` says.

    `placement` are arguments of transformers' loading: device_map, max_memory, offload_folder.
    """
    source = find_model(name, trust_remote_code)
    model = load_weights(source, dtype, device, placement)
    return with_tokenizer(TracedModel(name, model, runner_of(model), None, device), source)


def load_weights(
    source: ModelSource, dtype: str, device: str, placement: dict[str, Any] | None = None
) -> Any:
    """Load a model, with or without experts; raise where weights are missing or not finite."""
    name = source.name
    with loading(name):
        model, info = source.kind.from_pretrained(
            source.path,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            output_loading_info=True,
            **source.more,
            **(placement or {}),
        )
        absent = sorted(info["missing_keys"])
        if absent:
            raise BadInput(
                f"{name}: {len(absent)} weights are missing, such as {absent[0]}, and would be random; "
                "download the missing files"
            )
    check_finite(model, name)
    avoid_broken_amx(device, any(weight.dtype in HALF for weight in model.parameters()))
    return (model.to(device) if placement is None else model).eval()


def with_tokenizer(traced: Traced, source: ModelSource) -> Traced:
    """Give the model its tokenizer, or the reason why it has none."""
    if traced.window < 1:
        raise BadInput(f"{traced.name}: config.json gives the model {traced.window} positions; correct it")
    try:
        traced.tokenizer = load_tokenizer(source.path, source.more)
    except BadInput as error:
        traced.no_tokenizer = f"{error}, or {GIVE_IDS}"
    return traced


def check_sizes(kind: Any, config: Any, checkpoint: Checkpoint) -> None:
    """Reject a config that describes a larger model than the files hold, before memory is taken for it."""
    try:
        with torch.device("meta"):
            skeleton = kind(config)
    except Exception:  # loading fails in the same way, and says so
        return
    label = checkpoint.files.label("config.json")
    weights = dict(skeleton.named_parameters())
    for name, weight in weights.items():
        stored = checkpoint.tensors.get(name)
        if stored is not None and stored.parameters != weight.numel():
            raise BadInput(
                f"{stored.file}: tensor {name} has shape {list(stored.shape)}, but {label} makes it "
                f"{list(weight.shape)}; correct the config, or download both again"
            )
    held = sum(info.parameters for info in checkpoint.tensors.values())
    needed = sum(weight.numel() for weight in weights.values())
    largest = max(weights, key=lambda name: weights[name].numel())
    if needed > MOST_GROWTH * held:
        raise BadInput(
            f"{label}: describes {needed:,} parameters, {largest} {list(weights[largest].shape)} among them, "
            f"but the files hold {held:,}; correct the config, or download both again"
        )


def check_finite(model: nn.Module, name: str) -> None:
    """Reject a model with NaN or Inf in its weights, naming the tensor on disk."""
    for weight_name, weight in model.named_parameters():
        if weight.dtype not in (*HALF, torch.float32, torch.float64) or not weight.numel() or weight.is_meta:
            continue  # quantised: its scales are checked; on meta: accelerate holds it elsewhere
        if not torch.stack(weight.detach().aminmax()).isfinite().all():
            raise BadInput(f"{stored_defect(name) or f'{name}: {weight_name}'} {DEFECT}")


def stored_defect(name: str) -> str | None:
    """Return file and name of the checkpoint's first tensor with NaN or Inf; None if none can be found."""
    checkpoint = checked_checkpoint(name)
    if checkpoint is None:
        return None
    for tensor, info in checkpoint.tensors.items():
        with suppress(BadInput):
            if not checkpoint.read(tensor).isfinite().all():
                return f"{info.file}: tensor {tensor}"
    return None


@contextmanager
def named_failures(traced: TracedModel) -> Iterator[None]:
    """Turn what the model's own forward pass raises into one line with the model and the place in it."""
    try:
        yield
    except Exception as error:
        place = raised_in(traced.model, error)
        if place is None or isinstance(error, BadInput):
            raise
        remedy = "check config.json against the weights, or use another version of transformers"
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            remedy = "use a smaller --batch-size"
        raise BadInput(
            f"{traced.name}: its forward pass fails in {place} ({cause(error)}); {remedy}"
        ) from None


def raised_in(model: nn.Module, error: Exception) -> str | None:
    """Return the innermost module whose code raised the error; None if moescope's own code did."""
    names = {id(module): name for name, module in model.named_modules()}
    place = None
    for frame, _ in walk_tb(error.__traceback__):
        if place is not None and frame.f_globals.get("__name__", "").startswith("moescope."):
            return None
        place = names.get(id(frame.f_locals.get("self")), place)
    return place if place != "" else type(model).__name__


def needs_code(error: Exception) -> bool:
    return "trust_remote_code" in str(error)


def check_no_hub_code(name: str, config: Any) -> None:
    """Reject a config that names kernels of the hub: transformers would download and run them."""
    for key in ("_attn_implementation", "_experts_implementation"):
        for part in (config, config.get_text_config()):
            if "/" in str(getattr(part, key, None)):
                raise BadInput(f"{name}: config.json names code of the hub ({getattr(part, key)}); {TRUST}")


def load_tokenizer(path: str, more: dict[str, Any]) -> Any:
    """Return the model's tokenizer, or None where it has none."""
    from transformers import AutoTokenizer

    with quiet_transformers():
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, **more)
            # transformers makes an empty tokenizer where a folder holds none
            return tokenizer if tokenizer("a b c 1 2 3")["input_ids"] else None
        except Exception as error:  # whatever transformers raises on a damaged file
            if needs_code(error):
                raise BadInput(f"the tokenizer {CODE_NEEDED}") from None
            if any(os.path.exists(os.path.join(path, file)) for file in TOKENIZER_FILES):
                raise BadInput(f"its tokenizer cannot be loaded ({cause(error)}); repair it") from None
            return None


def model_class(config: Any, trust_remote_code: bool = False) -> Any:
    from transformers.models.auto import modeling_auto as auto

    if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or ()):
        return auto.AutoModelForCausalLM
    nested = [auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING] if hasattr(config, "text_config") else []
    mappings = [
        *nested,
        auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        auto.MODEL_MAPPING,
    ]
    for mapping in mappings:
        if type(config) in mapping:
            return mapping[type(config)]
    raise BadInput(f"model type {config.model_type!r}: transformers has no text model of it")


def runner_of(model: nn.Module) -> Any:
    """Return the smallest part of the model that holds all its MoE blocks: the stack without the head."""
    if hands_out_routing(model):
        return model
    n_blocks = len(find_blocks(model))
    candidates = [] if model.config.is_encoder_decoder else [getattr(model, "get_decoder", lambda: None)()]  # type: ignore[union-attr]
    for part in (*candidates, getattr(model, "base_model", None)):
        if isinstance(part, nn.Module) and part is not model and count_experts_modules(part) == n_blocks:
            return part
    return model


def count_experts_modules(part: nn.Module) -> int:
    return sum(
        type(module).__name__.endswith("Experts") and hasattr(module, "num_experts")
        for module in part.modules()
    )


def predicted_tokens(traced: TracedModel, output: Any, at: Integers) -> Integers:
    """Return the most likely next token at those positions of a pass; -1 for models without a head."""
    where = torch.from_numpy(at).to(traced.device)
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits.reshape(-1, logits.shape[-1])[where].argmax(-1).cpu().numpy()
    head = traced.model.get_output_embeddings() if hasattr(traced.model, "get_output_embeddings") else None
    if head is None:
        return np.full(len(at), -1)
    hidden = output.last_hidden_state
    states = hidden.reshape(-1, hidden.shape[-1])[where]
    # Scaling or capping logits does not change the largest.
    best = [head(part.to(head.weight.dtype)).argmax(-1) for part in states.split(HEAD_TOKENS)]
    return torch.cat(best).cpu().numpy() if best else np.zeros(0, dtype=np.int64)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and notices; moescope says what the user needs to know."""
    logging: Any = import_module("transformers.utils.logging")
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(python_logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def cause(error: BaseException) -> str:
    """Return an error's kind and first lines, on one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:3])}".removesuffix(": ")[:200]
