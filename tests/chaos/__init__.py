"""Chaos test: train a small run on the test cluster while random faults of a shared cluster happen.

    python -m tests.chaos --seeds 7 --faults 8       8 faults, chosen with seed 7; prints each fault and its cause

`driver.py` submits the run and chooses the faults. `faults.py` has one function per kind of fault. `inject/` contains a
`sitecustomize.py`, which causes faults inside the ranks, such as a NaN loss.

After the faults, the digest must equal that of an undisturbed run with the same layout and the same recorded decisions.
Each step and each sample must occur once. No damaged checkpoint may be loaded. The cause of each stop must be recorded.
"""
