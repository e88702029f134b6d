"""Profile of one step's time, by `step_profile`.

This file hides the standard library's module `profile` from the scripts in this folder, but torch imports that
module. An import of `profile` therefore gets the content of the standard library's module.
"""

if __name__ == "__main__":
    from step_profile import main

    main()
else:
    import runpy
    import sysconfig

    globals().update(runpy.run_path(f"{sysconfig.get_path('stdlib')}/profile.py", run_name="profile"))
