"""What a run tells people: metrics, log lines, plots, tables and dumped answers. Knows nothing of training."""
