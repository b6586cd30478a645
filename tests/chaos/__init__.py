"""Chaos: a small training on the real test cluster, to which everything happens that happens on a shared one.

    python -m tests.chaos --seeds 7 --faults 8       one sequence, with what was drawn and how each fault was told

`driver.py` runs a training and draws faults from a seed, `faults.py` holds one function per kind of fault, and
`inject/` is a folder for PYTHONPATH whose `sitecustomize.py` brings faults into the ranks that nobody can cause
from outside (a death in a certain phase of a save, a number that is no number, a rank that sleeps, a skewed clock).

After each sequence: the digest is that of an undisturbed run of the same layout (where steps were left out: of one that
was given the same decisions), every step and every sample is there once, no damaged checkpoint was loaded, and
every cause was told right.
"""
