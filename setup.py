"""Support tools that call setup.py. The package is declared in setup.cfg."""

from setuptools import setup

setup()
