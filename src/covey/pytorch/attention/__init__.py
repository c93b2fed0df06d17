"""Attention over packs, which are trees of tokens."""
