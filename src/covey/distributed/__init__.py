"""A run on several processes: ranks that train together."""
