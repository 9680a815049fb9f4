"""Telemetry: logs, metrics, memory, profiles, the run folder and the report."""
