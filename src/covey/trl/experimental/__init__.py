"""Names of `trl.experimental` that scripts import."""
