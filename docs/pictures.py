"""Every picture of the documentation and the command that makes it: `make docs-pictures` runs them all.

    python docs/pictures.py [FILE ...]     only these

With MOESCOPE_PICTURES_WORK=FOLDER the runs stay there and are made once.
Figures are drawn by `Run.figure`, pages of reports photographed in Chromium; drawings come from drawings.py.
"""

from __future__ import annotations

import io
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "pictures"
MODEL = "runs/demo/checkpoints/step-800"
TEXTS = "runs/demo/validation"
DOMAINS = ("arithmetic", "code", "headers", "prose", "records")
LARGEST = 200_000  # bytes per picture
INTERVENE = f"moescope intervene {MODEL} " + " ".join(
    f"--domain {name}={TEXTS}/{name}.jsonl" for name in DOMAINS
)
PLANTED = Path(__file__).parents[1] / "tests" / "planted.py"  # writes the checkpoint `planted`
TUNE = Path(__file__).parents[1] / "examples" / "tune.toml"
# The runs that pictures are taken of, by folder; later ones need the demo's.
RUNS = {
    "runs/demo": "moescope demo",
    "runs/planted": "moescope scan planted --out runs/planted",
    "runs/tuned": f"moescope train tune.toml --from {MODEL} --out runs/tuned",
    "runs/moved": f"moescope compare {MODEL} runs/tuned/checkpoints/step-60 --out runs/moved",
    "runs/half": f"moescope compress {MODEL} --keep 0.5 "
    + " ".join(f"--domain {name}={TEXTS}/{name}.jsonl" for name in DOMAINS)
    + " --max-tokens 20000 --apply runs/half-model --out runs/half",
    "runs/merged": f"moescope compress {MODEL} --method hc_smoe --keep 0.5 "
    + " ".join(f"--domain {name}={TEXTS}/{name}.jsonl" for name in DOMAINS)
    + " --max-tokens 6000 --out runs/merged",
    "runs/experts": f"{INTERVENE} --sweep experts --max-tokens 20000 --out runs/experts",
    "runs/directions": f"{INTERVENE} --sweep k --layers 0 --max-tokens 10000 --out runs/directions",
    "runs/deepseek": "moescope trace --recorded docs/data/deepseek_v2_lite.parquet --experts 64 "
    "--out runs/deepseek",
    "runs/qwen3-tokens": "moescope trace --recorded docs/data/qwen3_30b_a3b.route.csv.gz --save-tokens "
    "--out runs/qwen3-tokens",
    "runs/qwen3-served": "moescope deploy runs/qwen3-tokens --bandwidth 7 --expert-bytes 3059712 "
    "--out runs/qwen3-served",
}


@dataclass(frozen=True)
class Picture:
    """A figure of a run, or with `page` a part of the run's report."""

    file: str
    title: str
    caption: str
    run: str
    figure: str = ""
    part: str = ""  # of the run
    options: Mapping[str, int | str] = field(default_factory=dict)
    page: str = ""  # the report's address after #
    width: int = 1400

    @property
    def language(self) -> str:
        return "python" if self.figure else "sh"

    @property
    def code(self) -> list[str]:
        """The command, or the line of Python, that shows it."""
        if not self.figure:
            return [f"moescope report {self.run} --open"]
        part = f".parts[{self.part!r}]" if self.part else ""
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return [f"moescope.open({self.run!r}){part}.figure({self.figure!r}{options})".replace("'", '"')]


PICTURES = [
    Picture(
        "report-overview.webp",
        "The report: overview",
        "Key numbers, findings and the map of layers and experts; every cell opens an expert's page.",
        "runs/demo",
        page="/",
    ),
    Picture(
        "report-expert.webp",
        "The report: one expert",
        "Tokens, domains, co-activated experts and weights of one expert.",
        "runs/demo",
        page="/expert?layer=5&expert=3",
    ),
    Picture(
        "accuracy-by-k.webp",
        "Identification of experts over k",
        "Share of router rows whose own expert fits best, in a checkpoint whose structure is known.",
        "runs/planted",
        "identification_by_k",
    ),
    Picture(
        "null-density.webp",
        "Alignment against random pairings",
        "The mean alignment of a layer beside that of all pairings of the same rows and experts.",
        "runs/planted",
        "null_density",
    ),
    Picture(
        "ambiguity.webp",
        "Ambiguous layers",
        "The absolute ambiguity score of each layer and its chance level.",
        "runs/planted",
        "identification_by_layer",
    ),
    Picture(
        "load-heatmap.webp",
        "Load per layer and expert",
        "Share of tokens that each expert receives, on held-out text of five domains.",
        "runs/demo",
        "load_map",
        part="trace",
    ),
    Picture(
        "affinity.webp",
        "Experts and domains",
        "How much more a domain uses an expert than the mean over domains does.",
        "runs/demo",
        "affinity_heatmap",
        part="trace",
    ),
    Picture(
        "domain-information.webp",
        "Domain specialisation per layer",
        "Mutual information of expert and domain, with 95 % intervals over documents.",
        "runs/demo",
        "specialisation_by_layer",
        part="trace",
    ),
    Picture(
        "specialisation.webp",
        "The main domain of every expert",
        "Colour: the domain that uses an expert most; pale where permuted labels give as much.",
        "runs/demo",
        "specialisation_map",
        part="trace",
    ),
    Picture(
        "routing-ribbon.webp",
        "A text, token by token",
        "The first expert of every token and layer; below, the experts shared with the previous token.",
        "runs/demo",
        "routing_ribbon",
        part="trace",
    ),
    Picture(
        "lorenz.webp",
        "Lorenz curve of the load",
        "Share of the load of the busiest experts; grey: balanced random routing.",
        "runs/demo",
        "lorenz",
        part="trace",
    ),
    Picture(
        "load-by-step.webp",
        "Load over training",
        "A small map per layer; deaths and births of experts would be marked.",
        "runs/demo",
        "load_by_step",
    ),
    Picture(
        "dendrogram.webp",
        "Merges beside similarity and co-activation",
        "The tree is cut at the plan; both maps have its order of experts.",
        "runs/merged",
        "dendrogram",
    ),
    Picture(
        "loss.webp",
        "Training curves",
        "Loss of the shipped model in training, beside uniform and unigram baselines.",
        "runs/demo",
        "loss_by_step",
    ),
    Picture(
        "drift.webp",
        "What fine-tuning moved",
        "Relative distance of each expert from itself before 60 steps on code alone.",
        "runs/moved",
        "drift_heatmap",
    ),
    Picture(
        "perplexities.webp",
        "The cost of half the experts",
        "Held-out perplexity of the original, of the pruned model and of random pruning.",
        "runs/half",
        "damage_by_model",
        options={"quantity": "perplexity"},
    ),
    Picture(
        "saliency.webp",
        "Which experts matter",
        "REAP saliency per layer and expert; the dropped half is at the low end.",
        "runs/half",
        "saliency_heatmap",
    ),
    Picture(
        "effect-by-domain.webp",
        "Experts that a domain needs",
        "Loss when an expert is removed, beyond that of the other experts of its layer, by domain.",
        "runs/experts",
        "effect_by_domain",
    ),
    Picture(
        "effect-map.webp",
        "Loss when each expert is removed",
        "Loss difference per layer and expert; rings: more than the other experts of the layer.",
        "runs/experts",
        "effect_map",
    ),
    Picture(
        "projection-curve.webp",
        "Removing router directions",
        "Loss when router rows lose their component along their own expert, and random controls.",
        "runs/directions",
        "projection_curve",
    ),
    Picture(
        "deepseek-affinity.webp",
        "DeepSeek-V2-Lite: experts of layer 11 by task",
        "Use of each expert on law and translation relative to their mean; see the case study.",
        "runs/deepseek",
        "affinity_heatmap",
        options={"layer": 11},
    ),
    Picture(
        "deploy-caches.webp",
        "Qwen3-30B-A3B: expert caches",
        "Hit rate of caches of 8 to 64 experts per layer, beside Belady's optimum and random routing.",
        "runs/qwen3-served",
        "cache_curve",
    ),
    Picture(
        "deploy-report.webp",
        "The report: deployment",
        "Caches, prefetching, placement and coverage from one chat turn of Qwen3-30B-A3B.",
        "runs/qwen3-served",
        page="/deployment",
    ),
]


def make(pictures: list[Picture], work: Path) -> None:
    """Make the runs that these pictures need in the folder `work`, then the pictures."""
    import moescope

    shutil.copyfile(TUNE, work / "tune.toml")
    subprocess.run([sys.executable, PLANTED, work / "planted"], check=True)
    shutil.copytree(Path(__file__).parent / "data", work / "docs" / "data", dirs_exist_ok=True)
    needed = {"runs/demo", *(picture.run for picture in pictures)}
    needed |= {"runs/tuned"} if "runs/moved" in needed else set()
    needed |= {"runs/qwen3-tokens"} if "runs/qwen3-served" in needed else set()
    for folder, command in RUNS.items():
        if folder in needed and not (work / folder / "report.html").exists():
            print(command, flush=True)
            words = [sys.executable, "-m", *shlex.split(command), "--quiet"]
            subprocess.run(words, cwd=work, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    HERE.mkdir(exist_ok=True)
    pages = [picture for picture in pictures if picture.page]
    for picture in pictures:
        if picture.figure:
            run = moescope.open(work / picture.run)
            figure = (run.parts[picture.part] if picture.part else run).figure(
                picture.figure, **picture.options
            )
            figure.update_layout(template="plotly_white", margin={"t": 20, "r": 20, "b": 50, "l": 60})
            store(figure.to_image("png", width=900, height=420, scale=1.5), picture)
    if pages:
        photograph(pages, work)


def photograph(pages: list[Picture], work: Path) -> None:
    """Take pictures of pages of reports, in Chromium."""
    from playwright.sync_api import sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for picture in pages:
            page = browser.new_page(viewport={"width": picture.width, "height": 900}, color_scheme="light")
            page.goto(f"file://{(work / picture.run / 'report.html').resolve()}#{picture.page}")
            page.wait_for_timeout(2500)
            store(page.screenshot(), picture)
            page.close()
        browser.close()


def store(png: bytes, picture: Picture) -> None:
    from PIL import Image

    image: Any = Image.open(io.BytesIO(png)).convert("RGB")
    image.save(HERE / picture.file, "WEBP", quality=80, method=6)
    size = (HERE / picture.file).stat().st_size
    print(f"{picture.file}: {size / 1000:.0f} kB", flush=True)
    assert size <= LARGEST, f"{picture.file}: {size} bytes, more than {LARGEST}"


if __name__ == "__main__":
    asked = [picture for picture in PICTURES if not sys.argv[1:] or picture.file in sys.argv[1:]]
    with tempfile.TemporaryDirectory() as folder:
        make(asked, Path(os.environ.get("MOESCOPE_PICTURES_WORK", folder)))
