"""What a report's page holds as data, read back out of its HTML."""

from __future__ import annotations

import json
import re
from typing import Any


def payloads(html: str) -> dict[str, Any]:
    found = re.findall(r'<script type="application/json" id="p-([^"]+)">(.*?)</script>', html, re.DOTALL)
    return {name: json.loads(text) for name, text in found}
