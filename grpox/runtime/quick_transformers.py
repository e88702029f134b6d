"""transformers' models and generation, imported in seconds less: for its effect, before transformers itself."""

from __future__ import annotations

from grpox.runtime.lazy_imports import late

# The one is for assisted decoding, and brings SciPy's statistics; the other, for detecting objects.
with late("sklearn.metrics", "roc_curve"), late("scipy.optimize", "linear_sum_assignment"):
    import transformers.generation.utils
    import transformers.modeling_utils  # noqa: F401
