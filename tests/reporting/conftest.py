"""One browser for all tests of the page."""

import os
import shutil

import pytest
from playwright.sync_api import sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="session")
def browser():
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        if os.environ.get("MOESCOPE_REQUIRE_BROWSER"):
            pytest.fail("no Chromium on this machine, and MOESCOPE_REQUIRE_BROWSER is set")
        pytest.skip("NO BROWSER: install Chromium (apt-get install chromium) to test the report's page")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()
