"""Fetches uPlot, which draws the curves of a run's page, and writes it into the package unchanged.

    python requirements/uplot.py            # make uplot

`vendor.json` names version, address and hashes; a download that differs is refused. For a new version, change
`version` and `url` there, run with --renew, and look at the differences.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
import urllib.request
from pathlib import Path

VENDOR = Path(__file__).parents[1] / "grpox" / "observing" / "page" / "vendor"
RECORD = VENDOR / "vendor.json"
FILES = {
    "uPlot.iife.min.js": "dist/uPlot.iife.min.js",
    "uPlot.min.css": "dist/uPlot.min.css",
    "LICENSE": "LICENSE",
}
"""Name of each file here -> its path in the package of the registry."""


def main(renew: bool) -> int:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    with urllib.request.urlopen(record["url"], timeout=60) as answer:
        tarball = answer.read()
    with tarfile.open(fileobj=io.BytesIO(tarball)) as packed:
        contents = {}
        for name, path in FILES.items():
            member = packed.extractfile(f"package/{path}")
            assert member is not None, f"{record['url']} has no {path}"
            contents[name] = member.read()
    hashes = {
        "tarball": hashlib.sha256(tarball).hexdigest(),
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()},
    }
    if renew:
        RECORD.write_text(json.dumps(record | hashes, indent=2) + "\n", encoding="utf-8")
    elif hashes != {key: record[key] for key in hashes}:
        print(f"{record['url']} is not what {RECORD} describes: {hashes}", file=sys.stderr)
        return 1
    for name, content in contents.items():
        (VENDOR / name).write_bytes(content)
    print(f"{VENDOR}: uPlot {record['version']}")
    return 0


if __name__ == "__main__":
    sys.exit(main("--renew" in sys.argv[1:]))
