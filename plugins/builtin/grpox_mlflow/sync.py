"""Updates MLflow from the folder of a run that has ended; a second call changes nothing."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from grpox.errors import ConfigError, RunFailed, nearest, redact
from grpox.toolkit import duration, hold
from grpox_mlflow.link import FILE, RunLink, ending
from grpox_mlflow.shipment import Progress, Shipment
from grpox_mlflow.store import format_error, is_passing, quick_requests, resolved_uri

WAIT_SECONDS = 20.0
"""Seconds without an answer of the server after which the sync gives up."""
_PAUSE, _REQUEST = 2.0, 20


def sync(folder: Path, uri: str | None = None, progress: Progress | None = None) -> Shipment:
    """Write the data of a run that MLflow lacks: values, parameters, tags, files and outcome.

    After an error that may pass, continue from the same point while there is some progress.

    Args:
        uri: address of the store; default: the run's own store.

    Returns:
        The shipment, with counts of missing data, and its location.

    Raises:
        ConfigError: MLflow does not track the run of this folder, or the run has not ended.
        RunFailed: the store cannot be used.
    """
    link = RunLink.read(folder)
    if link is None:
        what = "holds no run" if folder.is_dir() else "no such folder"
        if (folder / "config.yaml").exists():
            what = "is the folder of a run without MLflow: its tracking names no mlflow"
        around = folder.parent if folder.parent.is_dir() else Path()
        runs = sorted(str(path.parent) for path in around.glob(f"*/{FILE}"))
        allowed = "a run's folder" + (f", such as {', '.join(runs[:5])}" if runs else "")
        raise ConfigError(what, given=str(folder), allowed=allowed, nearest=nearest(str(folder), runs))
    address = resolved_uri(uri) if uri is not None else link.address()
    with hold(folder), quick_requests(_REQUEST):
        shipment = Shipment(folder, replace(link, tracking_uri=redact(address)), address, live=False)
        shipment.ending = ending(folder)
        since, reached = time.monotonic(), (0, 0)
        while True:
            try:
                shipment.ship(progress)
                return shipment
            except Exception as error:
                if (position := (shipment.recorded.position, shipment.files)) != reached:
                    since, reached = time.monotonic(), position
                passed = time.monotonic() - since
                if not is_passing(error) or passed + _PAUSE > WAIT_SECONDS:
                    raise RunFailed(
                        f"MLflow at {redact(address)} cannot be written to: {format_error(error)}\n"
                        f"    tried for {duration(passed)}; nothing is lost: start the server and sync again,\n"
                        "    or name another one: --tracking-uri http://host:5000"
                    ) from error
                time.sleep(_PAUSE)
