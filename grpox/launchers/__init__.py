"""What each launcher tells the processes that it starts, by environment variables."""

from __future__ import annotations

from grpox.launchers.found import place_of, standard
from grpox.launchers.variables import Place

__all__ = ["Place", "place_of", "standard"]
