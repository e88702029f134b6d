"""All that `grpox doctor` looks at, put together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from grpox.cli.doctor.distributions import OPTIONAL, installed, misfits, requirements, version_of
from grpox.cli.doctor.finding import Finding, Status
from grpox.cli.doctor.machine import devices, launchers
from grpox.cli.doctor.torch_builds import misbuilt
from grpox.plugins.discovery import PluginSet


@dataclass(frozen=True)
class Checkup:
    """What was found, ordered by section."""

    findings: tuple[Finding, ...]

    @property
    def can_train(self) -> bool:
        """Whether nothing was found that keeps grpox from training."""
        return all(finding.status != "error" for finding in self.findings)


def check_up(plugins: PluginSet) -> Checkup:
    """Look at the environment and the machine; no network, and torch is not imported in this process."""
    known = [requirement.name for requirement in requirements("grpox")] if version_of("grpox") else []
    of_plugins = [record.distribution for record in plugins.records]
    parts = (
        installed(),
        misfits([*known, *OPTIONAL, *of_plugins]),
        misbuilt(),
        devices(),
        launchers(),
        generators(plugins),
        broken(plugins),
    )
    return Checkup(tuple(finding for part in parts for finding in part))


def generators(plugins: PluginSet) -> Iterator[Finding]:
    """Each generator that plugins offer: usable, or what it lacks and the command that installs it."""
    offers = [offer for offer in plugins.offers if offer.kind == "generator"]
    for offer in offers:
        if offer.status == "ok":
            yield Finding("generators", offer.spec.name, "ok", f"usable; {offer.spec.summary}")
        else:
            yield Finding("generators", offer.spec.name, "absent", offer.reason)
    if all(offer.status != "ok" for offer in offers):
        yield Finding("generators", "none", "error", "nothing can sample: no installed generator is usable")


def broken(plugins: PluginSet) -> Iterator[Finding]:
    """Plugins that did not load."""
    for record in plugins.records:
        if record.status != "ok":
            status: Status = "warning" if record.status == "broken" else "absent"
            told = f"{record} is {record.status}: {record.reason}"
            yield Finding("plugins", record.entry_point, status, told)
