"""A run file becomes a checked run, before anything heavy is imported.

`load` reads the file (`yaml_lines`), puts the command line on top (`overrides`), checks the schema, binds
every component and asks each of the checks here what it has against the run. `lock` notes which code a run
is made with, `recipes` are bundled run files, `from_trl` converts set-ups for TRL, `given` holds objects
that a Python caller passes in place of paths.
"""
