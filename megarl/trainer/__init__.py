"""The trainer: roles built on their grids, forward-only annotation, updates, and the export of weights."""
