"""Drivers of the same training by other programs: same model, weights, rows, precision and world size.

Each is a module with ``drive(job, clock)``, run in processes of its own: ``python -m benchmarks.peers NAME JOB.json``.
"""

DRIVERS = ("ours", "bare", "trainer", "accelerated", "titan")
