"""The page of a run: live in `grpox watch`, and frozen as its report."""
