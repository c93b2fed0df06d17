"""One run on many machines: units of sampling with the same numbers wherever they run, and who samples them."""
