"""How the ranks of a run come to be, and how they end together: local start, joining a given world, failure."""
