"""What a run tells about itself: log lines, metrics, memory, the run folder, and the report."""
