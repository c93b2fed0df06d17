"""A run in the browser: `covey watch RUN` reads the run folder, and nothing in the training process knows of it.

Names are loaded when they are asked for: only `create_app` needs a server's packages.
"""
