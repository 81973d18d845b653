"""Grids, process groups, partitions and pipeline schedules. What is planned here is data; executors are loops."""
