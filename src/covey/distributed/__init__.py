"""One run on many processes: units of sampling with the same numbers wherever they run, and ranks that train."""
