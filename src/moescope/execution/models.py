"""Models loaded by transformers, ready to be run over documents."""

from __future__ import annotations

import logging as python_logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from moescope.errors import BadInput, one_line, reason, reject_if
from moescope.execution.adapters import find_blocks, hands_out_routing
from moescope.execution.capture import check_transformers
from moescope.execution.chat_templates import ChatTemplate
from moescope.execution.documents import WINDOW
from moescope.execution.model_names import checked_checkpoint, tokenizer_files
from moescope.execution.replaced import replaced_classes
from moescope.processor import avoid_broken_amx
from moescope.types import Integers

HALF = (torch.bfloat16, torch.float16)
TRUST = "read it, and pass --trust-remote-code if you trust it"
CODE_NEEDED = f"is defined by Python code inside the checkpoint, which moescope does not run; {TRUST}"
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
        # a tokenizer raises what it likes, such as for an unknown word
        with one_line(f"{self.name}: its tokenizer cannot read the text", GIVE_IDS):
            return list(self.tokenizer(text, verbose=False)["input_ids"])

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
        known = (
            getattr(each, "pad_token_id", None) for each in (self.tokenizer, self.config.get_text_config())
        )
        return next((int(padding) for padding in known if padding is not None), 0)

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
    checkpoint = checked_checkpoint(name)
    stored = checkpoint.config if checkpoint is not None and checkpoint.config else {}
    more: dict[str, Any] = {"revision": revision} if revision else {}
    # for replaced routers moescope's classes are used; code in the checkpoint is never run
    more["trust_remote_code"] = trust_remote_code and KEY not in stored
    with loading(name):
        if KEY in stored:
            config, kind = replaced_classes(path, stored)
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
            remedy = "check config.json and the weights, or give another model folder or hub id"
            problem = f"{name}: transformers cannot load it ({reason(error)}); {remedy}"
            needs_code = "trust_remote_code" in str(error)
            raise BadInput(f"{name}: the model {CODE_NEEDED}" if needs_code else problem) from None


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
        absent = info["missing_keys"]
        reject_if(
            absent,
            f"{name}: {len(absent)} weights are missing, such as {min(absent, default='')}, and would be "
            "random; download the missing files",
        )
    check_finite(model, name)
    avoid_broken_amx(device, any(weight.dtype in HALF for weight in model.parameters()))
    return (model.to(device) if placement is None else model).eval()


def with_tokenizer(traced: Traced, source: ModelSource) -> Traced:
    """Give the model its tokenizer, or the reason why it has none."""
    reject_if(
        traced.window < 1, f"{traced.name}: config.json gives the model {traced.window} positions; correct it"
    )
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
    largest = max(weights, key=lambda name: weights[name].numel())
    detail = f"{largest} {list(weights[largest].shape)} among them, "
    check_growth(checkpoint, sum(weight.numel() for weight in weights.values()), detail)


def check_growth(checkpoint: Checkpoint, needed: int, detail: str = "") -> None:
    """Reject a config that describes so many parameters, where the files hold far fewer."""
    held = sum(info.parameters for info in checkpoint.tensors.values())
    reject_if(
        needed > MOST_GROWTH * held,
        f"{checkpoint.files.label('config.json')}: describes {needed:,} parameters, {detail}but the files "
        f"hold {held:,}; correct the config, or download both again",
    )


def check_finite(model: nn.Module, name: str) -> None:
    """Reject a model with NaN or Inf in its weights, naming the tensor on disk."""
    for weight_name, weight in model.named_parameters():
        if not is_finite(weight):
            checkpoint = checked_checkpoint(name)
            place = stored_defect(checkpoint, checkpoint.tensors) if checkpoint is not None else None
            raise BadInput(f"{place or f'{name}: {weight_name}'} {DEFECT}")


def is_finite(weight: Tensor) -> bool:
    """Whether a weight has no NaN or Inf, as far as it can be checked."""
    if weight.dtype not in (*HALF, torch.float32, torch.float64) or not weight.numel() or weight.is_meta:
        return True  # quantised: its scales are checked; on meta: accelerate holds it elsewhere
    return bool(torch.stack(weight.detach().aminmax()).isfinite().all())


def stored_defect(checkpoint: Checkpoint, names: Iterable[str]) -> str | None:
    """Return file and name of the first of these tensors with NaN or Inf; None if none can be found."""
    for name in names:
        with suppress(BadInput):
            if not checkpoint.read(name).isfinite().all():
                return f"{checkpoint.tensors[name].file}: tensor {name}"
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
            f"{traced.name}: its forward pass fails in {place} ({reason(error)}); {remedy}"
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


def check_no_hub_code(name: str, config: Any) -> None:
    """Reject a config that names kernels of the hub: transformers would download and run them."""
    for key in ("_attn_implementation", "_experts_implementation"):
        for part in (config, config.get_text_config()):
            reject_if(
                "/" in str(getattr(part, key, None)),
                f"{name}: config.json names code of the hub ({getattr(part, key)}); {TRUST}",
            )


def load_tokenizer(path: str, more: dict[str, Any]) -> Any:
    """Return the model's tokenizer, or None where it has none."""
    from transformers import AutoTokenizer

    files = tokenizer_files(path)
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(path, **more)
            # transformers makes an empty tokenizer where a folder holds none
            return tokenizer if tokenizer("a b c 1 2 3")["input_ids"] else None
    except Exception as error:  # whatever transformers raises on a damaged file
        reject_if("trust_remote_code" in str(error), f"the tokenizer {CODE_NEEDED}")
        reject_if(files, f"its tokenizer cannot be loaded ({reason(error)}); repair it")
        return None


def model_class(config: Any, trust_remote_code: bool = False) -> Any:
    from transformers.models.auto import modeling_auto as auto

    if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or ()):
        return auto.AutoModelForCausalLM
    kinds = ("IMAGE_TEXT_TO_TEXT_", "CAUSAL_LM_", "IMAGE_TEXT_TO_TEXT_", "SEQ_TO_SEQ_CAUSAL_LM_")
    names = [f"MODEL_FOR_{kind}MAPPING" for kind in kinds] + ["MODEL_MAPPING"]
    for name in names if hasattr(config, "text_config") else names[1:]:
        if type(config) in getattr(auto, name):
            return getattr(auto, name)[type(config)]
    raise BadInput(f"model type {config.model_type!r}: transformers has no text model of it")


def runner_of(model: nn.Module) -> Any:
    """Return the smallest part of the model that holds all its MoE blocks: the stack without the head."""
    if hands_out_routing(model):
        return model
    experts = {block.experts for block in find_blocks(model)}
    candidates = [] if model.config.is_encoder_decoder else [getattr(model, "get_decoder", lambda: None)()]  # type: ignore[union-attr]
    for part in (*candidates, getattr(model, "base_model", None)):
        if isinstance(part, nn.Module) and part is not model and experts <= set(part.modules()):
            return part
    return model


def predicted_tokens(traced: TracedModel, output: Any, at: Integers) -> Integers:
    """Return the most likely next token at those positions of a pass; -1 for models without a head."""
    where = torch.from_numpy(at).to(traced.device)
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits.flatten(0, -2)[where].argmax(-1).cpu().numpy()
    head = output_embeddings(traced.model)
    if head is None:
        return np.full(len(at), -1)
    states = output.last_hidden_state.flatten(0, -2)[where]
    # Scaling or capping logits does not change the largest.
    best = [head(part.to(head.weight.dtype)).argmax(-1) for part in states.split(HEAD_TOKENS)]
    return torch.cat(best).cpu().numpy()


def output_embeddings(model: Any) -> Any:
    """Return the model's head; None for models without one."""
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


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
