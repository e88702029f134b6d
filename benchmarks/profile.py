"""Where one step's time goes; `step_profile` does it.

The standard library's module of this name is hidden from the scripts in this folder, and torch imports it: for
whoever imports `profile`, this is that.
"""

if __name__ == "__main__":
    from step_profile import main

    main()
else:
    import runpy
    import sysconfig

    globals().update(runpy.run_path(f"{sysconfig.get_path('stdlib')}/profile.py", run_name="profile"))
