"""Puts this folder on the import path, so that tests in any room can import `fakes`."""
