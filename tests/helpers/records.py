"""Records of long tests: with FMICL_RECORDS=DIR, what they found and where is written to DIR/NAME.json."""

from __future__ import annotations

import json
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fmicl.utils.provenance import commit, versions


def record(name: str, part: str, facts: dict[str, Any]) -> None:
    """Write one part of a record; parts that earlier tests have written stay."""
    folder = os.environ.get("FMICL_RECORDS")
    if folder is None:
        return
    path = Path(folder) / f"{name}.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    found |= {
        "command": ["pytest", *sys.argv[1:]],
        "device": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": versions(["torch", "lightning", "sentence-transformers"]),
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
    }
    found.setdefault("parts", {})[part] = facts
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
