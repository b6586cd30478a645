"""Chaos test: random faults of a shared cluster hit a small training on the real test cluster.

    python -m tests.chaos --seeds 7 --faults 8       one sequence; prints each fault and the cause that was recorded

`driver.py` runs a training and chooses faults by a seed. `faults.py` has one function per kind of fault. `inject/` is
a folder for PYTHONPATH: its `sitecustomize.py` brings about faults inside the ranks that cannot be caused from outside
(death in a phase of a save, a NaN loss, a hanging rank, a skewed clock).

After each sequence, the test checks that the digest equals that of an undisturbed run with the same layout and the same
recorded decisions, that every step and every sample occurs once, that no damaged checkpoint was loaded, and that every
cause was recorded correctly.
"""
