"""Chaos test: a small run on the real test cluster is hit by random faults of a shared cluster.

    python -m tests.chaos --seeds 7 --faults 8       one sequence; prints each fault and the cause that was recorded

`driver.py` submits a run and chooses faults by a seed. `faults.py` has one function per kind of fault. `inject/` is a
folder for PYTHONPATH. Its `sitecustomize.py` causes faults inside the ranks: a kill in a phase of a save, a NaN loss, a
hanging rank, a skewed clock.

After each sequence, the test checks that:
- the digest equals that of an undisturbed run with the same layout and the same recorded decisions,
- every step and every sample occurs once,
- no damaged checkpoint was loaded,
- every cause was recorded correctly.
"""
