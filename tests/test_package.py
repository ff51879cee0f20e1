"""The package as others get it: one version everywhere, and a wheel that works without the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

import moescope

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_is_written_once_and_quoted_the_same_everywhere():
    assert "version" in PROJECT["dynamic"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == moescope.__version__
    newest = re.search(r"^## (\S+?),", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None
    assert newest[1] == moescope.__version__


def test_the_workflow_runs_every_python_that_the_package_claims():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "check.yml").read_text())
    claimed = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if ":: Python :: 3." in text]
    everything = workflow["jobs"]["everything"]
    assert everything["strategy"]["matrix"]["python"] == claimed
    assert ".ci/run" in [step.get("run") for step in everything["steps"]]
    assert claimed[0] == PROJECT["requires-python"].removeprefix(">=")


def test_the_lowest_versions_of_every_extra_are_installed_by_the_workflow():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "check.yml").read_text())
    commands = "\n".join(step.get("run", "") for step in workflow["jobs"]["lowest-versions"]["steps"])
    installed = re.search(r"--resolution lowest-direct --editable \"\.\[(.*)\]\"", commands)
    assert installed is not None
    extras = PROJECT["optional-dependencies"]
    covered = {requirement for name in installed[1].split(",") for requirement in extras[name]}
    assert covered == {requirement for extra in extras.values() for requirement in extra}


@pytest.mark.slow
def test_the_wheel_of_the_source_distribution_runs_the_demo_without_the_repository(tmp_path):
    copy, built, installed = tmp_path / "copy", tmp_path / "dist", tmp_path / "installed"
    ignored = shutil.ignore_patterns(".*", "runs", "site", "dist", "build", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, copy, ignore=ignored)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def run(*command: str, folder: Path = tmp_path) -> str:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("-c", f"from setuptools import build_meta; build_meta.build_sdist({str(built)!r})", folder=copy)
    pip = ["-m", "pip", "--disable-pip-version-check", "--no-input"]
    run(
        *pip,
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(built),
        str(next(built.glob("*.tar.gz"))),
    )
    wheel = next(built.glob(f"moescope-{moescope.__version__}-*.whl"))
    run(*pip, "install", "--no-deps", "--target", str(installed), str(wheel))
    shutil.rmtree(copy)
    environment["PYTHONPATH"] = str(installed)
    run("-c", f"import moescope; assert moescope.__file__.startswith({str(installed)!r}), moescope.__file__")
    printed = run("-m", "moescope", "demo", "--out", "runs/demo")
    assert (tmp_path / "runs" / "demo" / "report.html").stat().st_size > 100_000
    assert "report.html" in printed
    assert find_spec("moescope").origin.startswith(str(ROOT))  # this process still tests the source tree


def test_every_pinned_version_installs_on_the_oldest_python_that_the_package_claims():
    """Pins with a marker are for some Pythons; of all others the installed ones are asked."""
    oldest = PROJECT["requires-python"].removeprefix(">=")
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line and ";" not in line)
    asked = 0
    for found in metadata.distributions():
        wanted = found.metadata["Requires-Python"]
        name = found.metadata["Name"].lower().replace("_", "-")
        if wanted and pins.get(name) == found.version:
            asked += 1
            assert SpecifierSet(wanted).contains(f"{oldest}.0"), (name, found.version, wanted)
    if asked < 50:
        pytest.skip("not the pinned environment")
