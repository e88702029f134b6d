"""Imports transformers' models and generation several seconds faster; import it before transformers."""

from __future__ import annotations

from grpox.runtime.lazy_imports import late

# The first is for assisted decoding and imports SciPy's statistics; the second is for object detection.
with late("sklearn.metrics", "roc_curve"), late("scipy.optimize", "linear_sum_assignment"):
    import transformers.generation.utils
    import transformers.modeling_utils  # noqa: F401
