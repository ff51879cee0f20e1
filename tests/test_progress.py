"""What is said while work goes on, and what is not."""

from __future__ import annotations

import logging

import pytest

from moescope.progress import unsaid_alerts


@pytest.mark.parametrize("unsaid", [True, False])
def test_alerts_are_unsaid_only_where_that_was_asked_and_only_for_so_long(
    unsaid: bool, caplog: pytest.LogCaptureFixture
):
    logger = logging.getLogger("moescope")
    with unsaid_alerts(unsaid):
        logger.warning("step 3, layer 0: an alert")
        logger.error("what is an error is always said")
    logger.warning("after it")
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        *([] if unsaid else ["step 3, layer 0: an alert"]),
        "what is an error is always said",
        "after it",
    ]
