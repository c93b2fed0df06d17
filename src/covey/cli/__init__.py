"""The commands of `covey`: one file a command, put together in `app.py`."""
