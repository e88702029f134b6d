"""Turns a run file into a checked run, before anything heavy is imported.

`load` reads the file (`yaml_lines`), applies the command line (`overrides`), checks the schema, binds every
component and runs the checks in this package. `lock` records the code that a run uses, `recipes` are bundled
run files, `from_trl` converts setups for TRL, and `objects` handles Python objects passed instead of paths.
"""
