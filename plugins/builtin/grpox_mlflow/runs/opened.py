"""`grpox runs open`: where a run is to be seen, and the browser that shows it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from grpox_mlflow.runs.tracked import KEY_TAG, TrackedRun, shown_path

LOCAL_UI = "http://127.0.0.1:5000"
"""Where `mlflow ui` listens unless it is told otherwise."""
REPORT = "report.html"


@dataclass(frozen=True)
class Places:
    """Where a run is to be seen."""

    serve: str | None
    """The command that serves the store; None where a server does already."""
    page: str
    """The run in MLflow's UI, once that is served."""
    report: Path | None
    """The run's report, where that is on this machine."""

    @property
    def to_open(self) -> str | None:
        """What a browser can show as things are; None where that is nothing."""
        if self.serve is None:
            return self.page if self.page.startswith("http") else None
        return None if self.report is None else self.report.as_uri()

    def lines(self) -> list[str]:
        """For a terminal."""
        report = f"no {REPORT} here" if self.report is None else shown_path(self.report)
        told = {"serve": self.serve, "run": self.page, "report": report}
        return [f"{name + ':':<8}{place}" for name, place in told.items() if place is not None]


def places(run: TrackedRun, uri: str) -> Places:
    """Those of a run in the store at `uri`."""
    from grpox_mlflow.store import place_of

    place = place_of(uri, run.experiment_id, run.run_id)
    if not place.startswith("mlflow ui "):
        return Places(None, place, _report(run))
    return Places(place, place_of(LOCAL_UI, run.experiment_id, run.run_id), _report(run))


def show(address: str) -> bool:
    """Have a browser show `address`; False where there is none."""
    import webbrowser

    return webbrowser.open(address)


def _report(run: TrackedRun) -> Path | None:
    """That of the run's folder, unless a later run has it now; else its copy among artifacts on disk."""
    from grpox_mlflow.followed import FollowedRun

    followed = FollowedRun.read(run.folder) if run.folder is not None else None
    own = followed is not None and followed.key == run.tags.get(KEY_TAG)
    folders = [run.folder] if own and run.folder is not None else []
    parts = urlsplit(run.artifact_uri)
    if parts.scheme in ("", "file") and parts.path:
        folders.append(Path(url2pathname(parts.path)))
    return next((folder / REPORT for folder in folders if (folder / REPORT).is_file()), None)
