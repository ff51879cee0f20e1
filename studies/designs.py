"""The studies of this folder: their arms, written as studies/NAME/study.toml.

    python studies/designs.py

Arms have the winners of the tuning (studies/tuned.json), as far as they are known. Every study reads the text
that studies/data.py writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Design = dict[str, Any]

FOLDER = Path(__file__).parent
TUNED = FOLDER / "tuned.json"  # "best": router -> {"learning_rate": ..., its option: ...}; and see run.py
TEXT = "studies/text"
PROBE = "../spectra/paper_probes.py:probe"
DOMAINS = ("code", "drama", "encyclopedia", "math", "medicine", "stories")
UNSEEN_DOMAIN = "tinystories_ru"
UNSEEN = {UNSEEN_DOMAIN: f"{TEXT}/unseen/{UNSEEN_DOMAIN}.jsonl.gz"}
RATE = 2e-3  # before tuning
RATES = (1e-3, 2e-3, 4e-3)
MORE_RATES = (5e-4, 8e-3)  # for routers without an option, so that all have equal budgets
TUNING_SEEDS = [100, 101]  # of no other study
TUNING_STEPS = 300
CAUSAL_STEPS = 700
STEPS = 1000  # of 8,192 tokens
SWEEP_STEPS = 500
TASK_STEPS = 800  # of 2,048 tokens
BASE_STEPS, EXISTING_STEPS = 400, 120  # of a base, and of its routers and experts
EXISTING_BYTES = 5_000_000
SOME_STEPS = 1248  # 4 epochs of 10,000 rows
SMOKE_STEPS = 20
RHYTHM = {"warmup": 10, "evaluate_every": 5, "checkpoint_every": 2}  # times in a training of that size
SEEDS = 10
HASH_SEEDS = [10, 11, 12, 13, 14]  # not those of main, whose comparison of hash and top2 they repeat

# A token meets equally many parameters in every arm; with one expert per token experts are twice as wide and
# half as many, with four half as wide and twice as many.
ROUTERS: dict[str, Design] = {
    "dense": {},
    "hash": {},
    "switch_top1": {"d_ff": 512, "experts": 8},
    "top2": {},
    "topk": {"top_k": 4, "d_ff": 128, "experts": 32},
    "expert_choice": {},
    "loss_free": {},
    "spectra": {},
    "some": {},
}
# the option of each router that is tuned, its default in the middle
OPTIONS: dict[str, tuple[str, tuple[float, ...]]] = {
    "switch_top1": ("balance", (0.003, 0.01, 0.03)),
    "top2": ("balance", (0.003, 0.01, 0.03)),
    "topk": ("balance", (0.003, 0.01, 0.03)),
    "expert_choice": ("capacity_factor", (1.0, 1.25, 1.5)),
    "loss_free": ("rate", (0.0003, 0.001, 0.003)),
    "spectra": ("epsilon", (0.02, 0.05, 0.1)),
    "some": ("temperature", (0.4, 0.8, 1.6)),
}
SWEEP: dict[str, tuple[float, ...]] = {
    "capacity_factor": (1.0, 1.5, 2.0),
    "epsilon": (0.01, 0.02, 0.1, 0.2),
    "iterations": (1, 10, 30),
    "repulsion_weight": (0.0, 0.1, 2.0),
    "entropy_weight": (0.0, 0.01, 0.1),
}
SIZES: dict[str, Design] = {
    "S": {"d_model": 128, "d_ff": 256, "heads": 4},
    "M": {"d_model": 256, "d_ff": 512, "heads": 8},
    "L": {"d_model": 384, "d_ff": 768, "heads": 12},
}
VARIANTS: dict[str, Design] = {  # hash against top2
    "top2": {"router": "top2"},
    "hash": {"router": "hash"},
    "hash_previous": {"router": "hash", "router_options": {"of": "previous"}},
    "hash_random": {"router": "hash", "router_options": {"of": "occurrence"}},
    "top2_token": {"router": "top2", "router_options": {"reads": "embedding"}},
}


QUESTIONS = {  # of each study, in a sentence
    "tuning_rate": "Which learning rate is best for each router?",
    "tuning_option": "Which value of its main option is best for each router?",
    "tuning_edge": "Are values beyond the edges of the grids better?",
    "main": "Which router predicts best, each as it was tuned?",
    "controls": "What might tuning explain? Routers at each other's learning rate, options at other values.",
    "ablation": "What does each part of SPECTRA contribute? With a top2 of equal FLOPs.",
    "sweep": "Which options of SPECTRA balance the load in evaluation, and at what loss?",
    "scaling_experts": "How do loss and specialisation change with the number of experts?",
    "scaling_size": "Does the gain of a router grow with the model?",
    "scaling_rate": "Is it the size or the learning rate? SPECTRA at sizes M and L with the rates of top2.",
    "scaling_large": "Does SPECTRA gain over top-k at width 512 with 64 experts?",
    "causal": "Do alignment and ambiguity predict the effect of removing an expert?",
    "tasks": "Which continuation is right? Routers on tasks of lm-eval that lie in `studies/text/tasks`.",
    "existing": "What do new routers gain in models that exist, kept or upcycled?",
    "some": "SoME's runs A4 and B3 on Russian stories, with controls.",
    "some_published": "SoME's runs A4 and B1 to B3 with padding in the loss, as published.",
    "hash_bytes": "Why does a hash beat top2? On bytes.",
    "hash_bpe": "Why does a hash beat top2? On BPE tokens.",
}


def text(side: str) -> Design:
    held_out = {name: f"{TEXT}/{side}/{name}.jsonl.gz" for name in DOMAINS}
    return {
        "domains": {name: f"{TEXT}/train/{name}.jsonl.gz" for name in DOMAINS},
        "validation": held_out if side == "tune" else {**held_out, **UNSEEN},
    }


def base(side: str = "test", steps: int = STEPS, vocabulary: str = "bpe") -> Design:
    """What all arms of a study share; `side` holds the documents that are evaluated."""
    size = 8192 if vocabulary == "bpe" else 260
    return {
        "model": {
            **{"vocabulary": size, "d_model": 128, "layers": 6, "heads": 4, "d_ff": 256, "experts": 16},
            **{"max_positions": 256, "qk_norm": False},
        },
        "data": {"vocabulary": vocabulary, **text(side)},
        "train": {
            **{"steps": steps, "batch_size": 32, "sequence_length": 256, "warmup": max(steps // 10, 1)},
            **{"learning_rate": RATE, "final_learning_rate": RATE / 10, "dtype": "bfloat16"},
            **{"evaluate_every": max(steps // 10, 1), "evaluation_rows": 126},
            **{"checkpoint_every": max(steps // 4, 1), "compile": True},
        },
    }


def rate(value: float) -> Design:
    return {"learning_rate": value, "final_learning_rate": value / 10}


def arm(router: str, tuned: Design, options: Design | None = None, **model: Any) -> Design:
    """Return an arm with the router's tuned values, `options` over them."""
    best = dict(tuned.get(router, {}))
    train = rate(best.pop("learning_rate", RATE))
    chosen = {**best, **(options or {})}
    shape = {"router": router, **ROUTERS[router], **model}
    return {"model": {**shape, "router_options": chosen} if chosen else shape, "train": train}


def tuning_rate() -> Design:
    arms = {
        f"{router} learning_rate={value:g}": {**arm(router, {}), "train": rate(value)}
        for router in ROUTERS
        for value in sorted([*RATES, *(() if router in OPTIONS else MORE_RATES)])
    }
    return study(f"top2 learning_rate={RATE:g}", TUNING_SEEDS, arms, base("tune", TUNING_STEPS))


def tuning_option(rates: dict[str, float], more: dict[str, float]) -> Design:
    """Each router's option at its best learning rate; `more` are rates beyond the edges that won.

    The default, in the middle of the grid, was trained when the learning rate was tuned.
    """
    best = {router: {"learning_rate": value} for router, value in rates.items()}
    arms = {
        f"{router} {option}={value:g}": arm(router, best, {option: value})
        for router, (option, values) in OPTIONS.items()
        for value in values
        if value != values[1]
    }
    arms |= {
        f"{router} learning_rate={value:g}": {**arm(router, {}), "train": rate(value)}
        for router, value in more.items()
    }
    return study("top2 balance=0.003", TUNING_SEEDS, arms, base("tune", TUNING_STEPS))


def tuning_edge(rates: dict[str, float], edges: dict[str, dict[str, list[float]]]) -> Design:
    """Values beyond the edges that won, each with the other factor as when it was tuned."""
    best = {router: {"learning_rate": value} for router, value in rates.items()}
    arms = {
        f"{router} {option}={value:g}": {**arm(router, {}), "train": rate(value)}
        if option == "learning_rate"
        else arm(router, best, {option: value})
        for router, options in edges.items()
        for option, values in options.items()
        for value in values
    }
    return study(next(iter(arms)), TUNING_SEEDS, arms, base("tune", TUNING_STEPS))


def main_study(tuned: Design) -> Design:
    arms = {router: arm(router, tuned) for router in ROUTERS}
    arms["dense_total"] = arm(
        "dense", tuned, d_ff=2048
    )  # 2 x 2048 = 16 experts x 256: the size of all experts
    return study("top2", SEEDS, arms, base())


def controls(tuned: Design) -> Design:
    """SPECTRA and top2 at each other's learning rate, two options at other values; no claims.

    Tuning chose a weak balance loss for switch_top1, and for expert_choice a capacity that buys compute.
    """
    untuned = {"spectra": 2 * RATE, "top2": RATE / 2}
    rates = [tuned.get(router, {}).get("learning_rate", other) for router, other in untuned.items()]
    arms = {
        "top2": arm("top2", tuned),
        "top2 at the rate of spectra": {**arm("top2", tuned), "train": rate(rates[0])},
        "spectra at the rate of top2": {**arm("spectra", tuned), "train": rate(rates[1])},
        "switch_top1 balance=0.01": arm("switch_top1", tuned, {"balance": 0.01}),
        "expert_choice capacity_factor=1": arm("expert_choice", tuned, {"capacity_factor": 1.0}),
    }
    return study("top2", 5, arms, base())


def ablation(tuned: Design) -> Design:
    from moescope.decoder.routers import ROUTERS as CLASSES

    arms = {
        f"spectra{part}": {**arm("spectra", tuned, changes.get("router_options")), "question": "ablation"}
        for part, changes in CLASSES["spectra"].variants.items()
    }
    arms["top2"] = arm("top2", tuned)
    arms["top2_flops"] = arm("top2", tuned, d_ff=equal_width(tuned))
    return {**study("top2", SEEDS, arms, base()), "references": {"ablation": "spectra"}}


def equal_width(tuned: Design) -> int:
    """Return the expert width at which top2 has the FLOPs per token of spectra, to a multiple of 8."""
    from moescope.lab.config import config_from, preset_config
    from moescope.lab.study_task import costs

    def flops(design: Design) -> int:
        shared = base()
        model = {**shared["model"], **design["model"]}
        config = config_from({"model": model, "train": shared["train"]}, preset_config("nano"))
        return costs(config)["flops_per_token"]

    target, narrow, wide = (
        flops(one)
        for one in (arm("spectra", tuned), arm("top2", tuned, d_ff=256), arm("top2", tuned, d_ff=512))
    )
    width = 256 + 256 * (target - narrow) / (wide - narrow)  # FLOPs are linear in the width
    return 8 * round(width / 8)


def sweep(tuned: Design) -> Design:
    arms = {
        f"spectra {option}={value:g}": {
            **arm("spectra", tuned, {option: value}),
            **{"question": "sweep", "axes": {option: value}},
        }
        for option, values in SWEEP.items()
        for value in values
    }
    arms["spectra"] = {**arm("spectra", tuned), "question": "sweep"}
    return study("spectra", 3, arms, base(steps=SWEEP_STEPS))


def scaling_experts(tuned: Design) -> Design:
    arms = {
        f"{router} experts={number}": {
            **arm(router, tuned, experts=number),
            **{"question": "scaling", "axes": {"router": router, "experts": number}},
        }
        for router in ("top2", "spectra")
        for number in (4, 8, 16, 32, 64)
    }
    return study("top2 experts=16", 5, arms, base())


def scaling_size(tuned: Design) -> Design:
    """Three sizes. Rates were tuned at the smallest: larger ones also have it divided as the width grows."""
    arms: dict[str, Design] = {}
    for router in ("dense", "top2", "spectra"):
        for size, model in SIZES.items():
            one = arm(router, tuned, **model)
            axes = {"question": "scaling", "axes": {"router": router, "size": size}}
            arms[f"{router} {size}"] = {**one, **axes}
            times = model["d_model"] // SIZES["S"]["d_model"]
            if times > 1:
                lower = float(f"{one['train']['learning_rate'] / times:.2g}")
                arms[f"{router} {size} at {lower:g}"] = {**one, "train": rate(lower), **axes}
    return study("top2 S", 5, arms, base())


def scaling_rate(tuned: Design) -> Design:
    """SPECTRA at sizes M and L with the rates that count for top2 in `scaling_size`: size, or rate?"""
    trained = scaling_size(tuned)["arms"]
    arms: dict[str, Design] = {}
    for size in list(SIZES)[1:]:
        lower = min(one["train"]["learning_rate"] for name, one in trained.items() if f"top2 {size}" in name)
        arms[f"spectra {size} at {lower:g}"] = {**trained[f"spectra {size}"], "train": rate(lower)}
    return study(next(iter(arms)), 5, arms, base())


def scaling_large(tuned: Design) -> Design:
    """Width 512 with 64 experts; the rates that were tuned at width 128 are divided by 4.

    Two checkpoints instead of four: with the optimizer's state a training then needs 20 GB of disk.
    """
    shape = {"d_model": 512, "d_ff": 1024, "heads": 8, "experts": 64, "top_k": 2}
    arms = {}
    for router in ("topk", "spectra"):
        one = arm(router, tuned, **shape)
        arms[router] = {**one, "train": rate(one["train"]["learning_rate"] / 4)}
    shared = base()
    shared["train"]["checkpoint_every"] = STEPS // 2
    return study("topk", 5, arms, shared)


def causal(tuned: Design) -> Design:
    """Trainings whose experts are then removed one by one (causal.py)."""
    arms = {router: arm(router, tuned) for router in ("top2", "topk", "spectra")}
    return study("top2", 5, arms, base(steps=CAUSAL_STEPS))


def tasks() -> Design:
    """Routers on tasks of lm-eval, small enough to train on two cores."""
    both = {"learning_rate": 2 * RATE}  # not tuned at this size
    arms = {router: arm(router, {router: both}) for router in ("dense", "hash", "top2", "spectra")}
    shared = base(steps=TASK_STEPS)
    shared["model"] |= {"vocabulary": 2048, "d_model": 64, "layers": 4, "d_ff": 128, "experts": 8}
    shared["train"] |= {"batch_size": 16, "sequence_length": 128, "dtype": "float32", "compile": False}
    return {**study("top2", 5, arms, shared), "tasks": f"{TEXT}/tasks"}


def existing(tuned: Design) -> Design:
    """Routers in models that exist (existing.py): arms are "BASE: WAY"."""
    experts = {"experts": 8, "top_k": 2, "d_ff": 512}
    bases: dict[str, tuple[Design, Design]] = {  # of the base, and of what it is with other routers
        "dense small, upcycled": ({"router": "dense"}, experts),
        "dense medium, upcycled": (
            {"router": "dense", "d_model": 256, "d_ff": 512, "heads": 8},
            {**experts, "d_model": 256, "d_ff": 1024, "heads": 8},
        ),
        "existing MoE": ({"router": "topk", "top_k": 2, "experts": 8}, {"experts": 8}),
    }
    arms: dict[str, Design] = {}
    longer = {**rate(RATE / 2), "steps": EXISTING_STEPS, "warmup": EXISTING_STEPS // 10}
    for name, (model, experts) in bases.items():
        arms[f"{name}: untouched"] = {"model": model, "train": {"steps": BASE_STEPS}}
        arms[f"{name}: trained on"] = {"model": model, "train": longer}
        for router in ("top2", "spectra"):
            options = {key: value for key, value in tuned.get(router, {}).items() if key != "learning_rate"}
            chosen = {"router_options": options} if options else {}
            arms[f"{name}: {router}"] = {"model": {**experts, "router": router, **chosen}, "train": longer}
    kept = arms["existing MoE: top2"]
    arms["existing MoE: top2"] = {**kept, "axes": {"rows": "trained"}}
    arms["existing MoE: top2, new rows"] = {**kept, "axes": {"rows": "new"}}
    shared = base(steps=BASE_STEPS)
    shared["data"]["max_bytes"] = EXISTING_BYTES
    shared["train"] |= {"evaluate_every": BASE_STEPS, "checkpoint_every": BASE_STEPS, "compile": False}
    return study("existing MoE: untouched", 5, arms, shared)


def hash_study(vocabulary: str, tuned: Design) -> Design:
    """Hash against top2, and what explains the difference: tables, what is hashed, what the router reads."""
    arms: dict[str, Design] = {}
    for times, suffix, question in ((1, "", "main"), (4, " x4", "scaling")):
        for name in VARIANTS if times == 1 else ("top2", "hash"):
            model = VARIANTS[name]
            options = model.get("router_options")
            one = arm(model["router"], tuned, options)
            train = {**one["train"], "steps": times * STEPS, "warmup": times * STEPS // 10}
            arms[f"{name}{suffix}"] = {"model": one["model"], "train": train, "question": question}
    design = study("top2", HASH_SEEDS, arms, base(vocabulary=vocabulary))
    return {**design, "references": {"scaling": "top2 x4"}}


def some(length: int) -> Design:
    """SoME's published runs on Russian stories.

    At 768 tokens with pads as targets, as published: all runs. At 320, which holds every row, without pads:
    the smallest and the largest with controls. A checkpoint of the largest has 11 GB: one is written, at the
    end.
    """
    published = {f"published_{name}": True for name in ("usage", "peers", "order", "pads", "temperature")}
    arms: dict[str, Design] = {
        name: {"model": {"experts": number}} for name, number in (("B1", 128), ("B2", 256), ("B3", 512))
    }
    controls: dict[str, Design] = {
        "A4 frozen keys": {"router_options": {**published, "frozen_keys": True}},
        "A4 zero experts": {"expert_init": "zero"},
        "A4 trained experts": {"frozen_experts": False, "frozen_dtype": "float32"},
        "A4 dense": {"router": "dense", "router_options": {}, "frozen_experts": False},
    }
    arms = {"A4": {"model": {"experts": 64}}, **arms}
    if length < 768:
        arms = {"A4": arms["A4"], "B3": arms["B3"]} | {
            name: {"model": model} for name, model in controls.items()
        }
    layout = {} if length < 768 else {"layout": "padded"}
    shared = {
        "model": {"max_positions": length},
        "data": {
            "vocabulary": "bpe",
            **layout,
            "domains": {"tinystories_ru": f"{TEXT}/some/train/tinystories_ru.jsonl.gz"},
            "validation": {"tinystories_ru": f"{TEXT}/some/test/tinystories_ru.jsonl.gz"},
        },
        "train": {
            **{"steps": SOME_STEPS, "checkpoint_every": SOME_STEPS, "sequence_length": length},
            **{"evaluation_rows": 2000, "compile": True},
        },
    }
    seeds = 5 if length < 768 else 2
    return {"preset": "some_a4", **study("A4", seeds, arms, shared)}


def study(reference: str, seeds: int | list[int], arms: dict[str, Design], shared: Design) -> Design:
    top = {"reference": reference, "seeds": seeds, "keep": "none", "probe": PROBE}
    return {**top, "base": shared, "arms": arms}


def designs(tuned: Design) -> dict[str, Design]:
    """Return every study by name, with the winners of the tuning as far as they are known."""
    edges = tuned.get("edges") or {"top2": {"learning_rate": [8 * RATE, 16 * RATE]}}
    return {
        "tuning_rate": tuning_rate(),
        "tuning_option": tuning_option(tuned.get("rates", {}), tuned.get("more", {})),
        "tuning_edge": tuning_edge(tuned.get("rates", {}), edges),
        "main": main_study(tuned.get("best", {})),
        "controls": controls(tuned.get("best", {})),
        "ablation": ablation(tuned.get("best", {})),
        "sweep": sweep(tuned.get("best", {})),
        "scaling_experts": scaling_experts(tuned.get("best", {})),
        "scaling_size": scaling_size(tuned.get("best", {})),
        "scaling_rate": scaling_rate(tuned.get("best", {})),
        "scaling_large": scaling_large(tuned.get("best", {})),
        "causal": causal(tuned.get("best", {})),
        "tasks": tasks(),
        "existing": existing(tuned.get("best", {})),
        "some": some(320),
        "some_published": some(768),
        "hash_bytes": hash_study("bytes", tuned.get("best", {})),
        "hash_bpe": hash_study("bpe", tuned.get("best", {})),
    }


def read_tuned(path: Path = TUNED) -> Design:
    found: Design = json.loads(path.read_text()) if path.exists() else {}
    return found


# --- TOML


def toml(design: Design) -> str:
    """Return a study as TOML: tables two levels deep, everything below inline."""
    lines = [f"{key} = {inline(value)}" for key, value in design.items() if key not in ("base", "arms")]
    for part, table in design["base"].items():
        lines += ["", f"[base.{part}]", *(f"{key} = {inline(value)}" for key, value in table.items())]
    for name, table in design["arms"].items():
        title = name if name.replace("_", "").isalnum() else json.dumps(name)
        lines += ["", f"[arms.{title}]", *(f"{key} = {inline(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{quoted(key)} = {inline(one)}" for key, one in value.items()) + " }"
    return json.dumps(value)  # numbers, texts, booleans and lists are written alike


def quoted(key: str) -> str:
    return key if key.replace("_", "").isalnum() else json.dumps(key)


# --- smoke


def shrink(design: Design) -> Design:
    """Return the study at nano size: two seeds, few steps, the embedded corpus."""
    vocabulary = design["base"]["data"]["vocabulary"]
    model = {"d_model": 32, "layers": 2, "heads": 2, "d_ff": 32, "max_positions": 64, "qk_norm": False}
    model |= {"vocabulary": 512 if vocabulary == "bpe" else 260, "experts": 8}
    train = {"steps": SMOKE_STEPS, "batch_size": 8, "sequence_length": 64, "learning_rate": 0.02}
    train |= {
        "final_learning_rate": 0.002,
        **{key: SMOKE_STEPS // part for key, part in RHYTHM.items()},
        "evaluation_rows": 10,
        "dtype": "float32",
    }
    arms = {}
    for name, table in design["arms"].items():
        changed = {key: value for key, value in table["model"].items() if key not in ("d_ff", "heads")}
        changed |= {"d_model": table["model"]["d_model"] // 4} if "d_model" in table["model"] else {}
        changed |= {"d_ff": table["model"]["d_ff"] // 64 * 8} if "d_ff" in table["model"] else {}
        if design.get("preset") and "experts" in changed:
            changed["experts"] //= 8
        given, each = table.get("train", {}), {}
        if "steps" in given:
            each["steps"] = max(SMOKE_STEPS * given["steps"] // design["base"]["train"]["steps"], 1)
            each |= {key: max(each["steps"] // part, 1) for key, part in RHYTHM.items()}
        each |= rate(10 * given["learning_rate"]) if "learning_rate" in given else {}
        arms[name] = {**table, "model": changed, "train": each}
    layout = {key: value for key, value in design["base"]["data"].items() if key == "layout"}
    data = {"vocabulary": vocabulary, "max_bytes": 400_000, **layout}
    small = {"model": model, "data": data, "train": train}
    return {**design, "seeds": 2, "base": small, "arms": arms}


def write_designs(store: Path, tuned: Design) -> None:
    """Write the files of all studies that have no results yet."""
    for name, design in designs(tuned).items():
        if not (store / name / "results.parquet").exists():
            (store / name).mkdir(parents=True, exist_ok=True)
            (store / name / "study.toml").write_text(toml(design))


if __name__ == "__main__":
    write_designs(FOLDER, read_tuned())
