"""`drill`: cause faults in a copy of a run, and compare the result with that of an undisturbed copy.

`faults.py` has one function per fault, which the chaos test of the test suite also uses. `target.py` reaches the
processes and the job of a run. `drill.py` trains the copies, and `page.py` describes the results.
"""
