"""The packages of the distribution. Everything else is declared in setup.cfg."""

from setuptools import find_namespace_packages, setup

PATTERNS = ["cli*", "slurm*", "tracking*", "planning*", "pipeline*", "data_prep*", "configs*", "client*"]

# The package `sluice` is installed twice: for `import sluice` in this environment, and in the directory `client`, which
# jobs put on the PYTHONPATH of commands that run in other environments.
setup(
    packages=[*find_namespace_packages(include=PATTERNS, exclude=["*.__pycache__"]), "sluice"],
    package_dir={"sluice": "client/sluice"},
)
