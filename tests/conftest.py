"""What every test runs under, its subprocesses too."""

from __future__ import annotations

import gc
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from moescope.processor import avoid_broken_amx

with suppress(ImportError):  # `make test-gpu` runs where it is not installed
    from hypothesis import settings

    # The same examples in every run: a rare one must not decide whether an unrelated change passes.
    settings.register_profile("moescope", derandomize=True, database=None)
    settings.load_profile("moescope")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background of a shell, this process ignores it, and so would every process that a test
    # interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)

if TYPE_CHECKING:
    from moescope.run import Run

# The matrices of the tests are tiny: threads that wait for each other cost more than they bring. Before
# torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")
avoid_broken_amx("cpu", half_precision=True)
# Subprocesses test this source tree, not one that happens to be installed.
SOURCE = str(Path(__file__).parents[1] / "src")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [SOURCE, os.environ.get("PYTHONPATH")]))


# Files with the most work, longest first: whichever worker takes one last, the other would wait for it.
LONGEST = (
    *("faults/test_kills.py", "faults/test_fuzz.py", "reporting/test_report.py", "test_documentation.py"),
    *("lab/test_existing.py", "lab/test_learning.py", "lab/test_study.py", "lab/test_shared_training.py"),
    *("reporting/test_workbench.py", "reporting/test_browser.py", "reporting/test_overviews.py"),
    *(
        "routing/test_browser.py",
        "lab/test_train.py",
        "routing/test_monitor_adapters.py",
    ),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--torture", action="store_true", help="kill at every write, damage 10,000 inputs")


@pytest.fixture(scope="session")
def torture(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--torture"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put long files first; deselect what needs a CUDA device, unless `-m` asks for it."""
    tests = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        file = item.path.relative_to(tests).as_posix() if item.path.is_relative_to(tests) else ""
        return LONGEST.index(file) if file in LONGEST else len(LONGEST)

    items.sort(key=place)
    if "gpu" not in config.option.markexpr:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu")])
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_collection_finish() -> None:
    """Exempt what collection leaves, 600,000 objects, from every later garbage collection: 0.4 s each."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """Run `moescope WORDS` in this process and in tmp_path; return (exit code, stdout, stderr)."""
    from moescope import cli

    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["moescope", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        shown = capsys.readouterr()
        return int(ended.value.code or 0), shown.out, shown.err

    yield run
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def planted_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The planted checkpoint scanned, raw and centered.

    The truth most tests of figures and reports look at.
    """
    from moescope.weights.verb import scan
    from planted import write_planted

    folder = tmp_path_factory.mktemp("planted")
    write_planted(folder / "planted-mixtral", seed=0)
    return scan(folder / "planted-mixtral", out=folder / "run", router="raw,centered", quiet=True)


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Twelve steps of a tiny model, with all that `moescope train` leaves; not to be changed."""
    from lab.tiny_training import TOML
    from moescope.lab.train import train
    from moescope.run import Run

    folder = tmp_path_factory.mktemp("trained")
    (folder / "tiny.toml").write_text(TOML.format(steps=12))
    run = train(folder / "tiny.toml", out=folder / "run", router="top2", device="cpu", quiet=True)
    assert isinstance(run, Run)
    return run


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """The address of a real Ray cluster of two CPUs, started as a user would.

    Its workers can import the tests' builders too.
    """
    import psutil

    from ray_work import survivors

    folder = Path(tempfile.mkdtemp(prefix="rays-", dir="/tmp"))  # sockets need short paths
    tests = str(Path(__file__).parent)
    # a token of its own, so that neither this cluster nor its clients look for one in the user's home
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], tests])}
    options = [
        "--head",
        "--block",
        "--num-cpus",
        "2",
        "--port",
        "0",
        "--include-dashboard",
        "false",
        "--disable-usage-stats",
    ]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options, "--temp-dir", str(folder)]
    with (folder / "log").open("w") as log:
        head = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    deadline = time.monotonic() + 120
    while "Ray runtime started" not in (folder / "log").read_text():
        assert head.poll() is None, (folder / "log").read_text()
        assert time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.1)
    yield (folder / "ray_current_cluster").read_text()
    family = psutil.Process(head.pid).children(recursive=True)
    head.send_signal(signal.SIGTERM)
    head.wait(60)
    assert survivors(family) == [], "Ray left processes behind"
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        os.environ.pop(name)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def connected(ray_cluster: str) -> Iterator[str]:
    """This process connected to the cluster, so that its workers are kept from test to test."""
    from moescope import engine

    with engine.ray_cluster(ray_cluster):
        yield ray_cluster


@pytest.fixture(scope="session")
def traced_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two checkpoints of a tiny model traced on two domains in both phases, every token kept."""
    from moescope.routing.trace import trace
    from routing.tiny_text import save_model, texts, write_jsonl

    folder = tmp_path_factory.mktemp("traced")
    models = [save_model(folder / "checkpoint-100"), save_model(folder / "checkpoint-200", nudge=0.05)]
    plain = write_jsonl(folder / "plain.jsonl", texts(30, seed=0, words=25))
    other = write_jsonl(folder / "other.jsonl", texts(30, seed=1, first=25, words=25))
    domains = [f"plain={plain}", f"other={other}"]
    return trace(*models, domain=domains, out=folder / "run", phase="both", save_tokens=True, quiet=True)


@pytest.fixture(scope="session")
def compressed_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A tiny model pruned to half by what a text shows, written beside it as `small`.

    And judged with two random controls.
    """
    from moescope.compression.verb import compress
    from routing.tiny_text import save_model, texts, write_jsonl

    folder = tmp_path_factory.mktemp("compressed")
    model, text = save_model(folder / "model"), write_jsonl(folder / "text.jsonl", texts(150))
    return compress(
        model,
        method="reap",
        keep=0.5,
        text=text,
        apply=folder / "small",
        out=folder / "run",
        controls=2,
        quiet=True,
    )


@pytest.fixture(scope="session")
def merged_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A tiny model whose four experts per layer are merged into two, planned but not written."""
    import numpy as np

    from families.tiny_models import tiny_model
    from moescope.compression.verb import compress

    folder = tmp_path_factory.mktemp("merged")
    model = tiny_model("mixtral").save(folder / "model", "saved")
    np.save(folder / "ids.npy", np.random.default_rng(0).integers(3, 60, (30, 20)))
    ids = folder / "ids.npy"
    return compress(
        model, method="hc_smoe", keep=2, token_ids=ids, out=folder / "run", quiet=True, controls=1
    )


@pytest.fixture(scope="session")
def compared_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two checkpoints compared; layer 2, expert 1 changed ten times as far as the rest."""
    import torch

    from checkpoints import tiny_checkpoint, tiny_config, tiny_tensors, write_checkpoint
    from moescope.comparison.verb import compare

    folder = tmp_path_factory.mktemp("compared")
    sizes = {"layers": 3, "experts": 4, "d_model": 16, "d_ff": 12}
    generator = torch.Generator().manual_seed(5)  # not the model's: its noise would be a change of scale
    tensors = tiny_tensors(**sizes)
    for name, tensor in tensors.items():
        share = 0.4 if "layers.2.block_sparse_moe.experts.1." in name else 0.04
        tensors[name] = tensor + share * torch.randn(tensor.shape, generator=generator)
    base = tiny_checkpoint(folder / "<b>base", **sizes)
    tuned = write_checkpoint(folder / "tuned", tensors, tiny_config(3, 4))
    return compare(base, tuned, out=folder / "run", matched=True, quiet=True)


@pytest.fixture(scope="session")
def deep_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """A scan and a trace of one model with as many layers as the questions over layers need."""
    from moescope.routing.trace import trace
    from moescope.weights.verb import scan
    from routing.routing_runs import deep_model
    from routing.tiny_text import texts, write_jsonl

    folder = tmp_path_factory.mktemp("deep")
    model, text = deep_model(folder / "model"), write_jsonl(folder / "text.jsonl", texts(24))
    traced = trace(model, text=text, out=folder / "trace", quiet=True)
    return scan(model, out=folder / "scan", router="raw,centered", quiet=True), traced


@pytest.fixture(scope="session")
def seeded_study(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A study of every question under five seeds; one training failed, one arm was not run."""
    from lab.study_runs import more_arms, router_arms, study_run

    return study_run(
        tmp_path_factory.mktemp("study") / "everything",
        arms=[*router_arms(), *more_arms()],
        failed=(("hash", 2),),
        not_run=("switch_top1",),
        references={"ablation": "spectra"},
    )


@pytest.fixture(scope="session")
def page_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Kind of run -> its report, built once: page_of("scan")."""
    from browsing import RUNS_OF
    from moescope.reporting.verb import report

    folder = tmp_path_factory.mktemp("pages")

    def build(kind: str) -> Path:
        out = folder / f"{kind}.html"
        if not out.exists():
            runs = request.getfixturevalue(RUNS_OF[kind])
            report(*(runs if isinstance(runs, tuple) else [runs]), out=out)
        return out

    return build


@pytest.fixture
def blank_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports without content: the page itself takes seconds, and other tests look at it."""
    from moescope.reporting.verb import OWN_MARK

    monkeypatch.setattr("moescope.reporting.page.page_content", lambda *given: {})
    monkeypatch.setattr("moescope.reporting.page.render", lambda content: OWN_MARK.decode())


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="session")
def browser():
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        if os.environ.get("MOESCOPE_REQUIRE_BROWSER"):
            pytest.fail("no Chromium on this machine, and MOESCOPE_REQUIRE_BROWSER is set")
        pytest.skip("NO BROWSER: install Chromium (apt-get install chromium) to test the report's page")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=60_000)  # a busy machine takes longer than five seconds
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


@pytest.fixture(scope="session")
def only_page(browser):
    """The page in which every test opens its reports, at a sixth of the cost of a new one; its troubles."""
    page, troubles = browser.new_page(), []
    page.set_default_timeout(60_000)
    page.on("console", lambda message: troubles.append(message.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("dialog", lambda dialog: troubles.append(dialog.message) or dialog.dismiss())
    local = ("file:", "data:", "blob:")
    page.on("request", lambda request: request.url.startswith(local) or troubles.append(request.url))
    return page, troubles


@pytest.fixture
def opened(only_page, page_of):
    """Open a report, of a kind of run or at a path, instead of the one before.

    Afterwards the page may have said nothing, and asked for nothing.
    """
    page, troubles = only_page
    troubles.clear()

    def open_report(report: str | Path, place: str = "#/overview", width: int = 1400, scheme: str = "light"):
        path = report if isinstance(report, Path) else page_of(report)
        page.goto("about:blank")
        page.mouse.move(0, 0)
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(media="screen", color_scheme=scheme)
        page.goto(path.as_uri() + place)
        return page

    yield open_report
    assert troubles == []
