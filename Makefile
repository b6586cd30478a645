# make run            set up .venv and run the quickstart, from documents to an evaluated model
# make test           run before each commit: make check, unit tests, one whole run on this machine
# make test-cluster   test whole runs, most of them on a real Slurm (root, Debian); run before you merge a change
# make test-long      run the tests with all combinations of parameters, then test-mpich and test-debian13; takes hours
# make install        set up .venv only
# make check          ruff and mypy
# make format         let ruff format
# make generated      write the files that are generated from pipeline/config (configs/schema.json, docs/config.md)
# make cluster        start a Slurm of four nodes on this machine (root, Debian); make cluster-down stops it
# make count          count lines and files of each package, config keys and commands
# make bench          run the benchmarks, which write tables to benchmarks/results/
# make test-gpu-fake  test CUDA code on a fake GPU (tests/fake_gpu) in .venv-cuda (5 GB), or with CUDA_PYTHON=…/bin/python
#                     if it has a CUDA build of torch
# make test-mpich     run the tests of the MPI backend with MPICH instead of Open MPI, in .venv-mpich
# make test-debian13  run the cluster tests with Slurm 24.11 in a Debian 13 (root, network, 1.4 GB)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Build dependencies are also pinned: by PIP_CONSTRAINT up to pip 25.2, later by PIP_BUILD_CONSTRAINT.
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=$(CURDIR)/constraints.txt \
	PIP_BUILD_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/pip install --quiet
CONFIG ?= configs/quickstart.yaml

.PHONY: run install test test-cluster test-long count generated test-gpu-fake test-mpich test-debian13 check format bench cluster cluster-down clean

run: install
	$(BIN)/python submit.py $(CONFIG)

install: $(VENV)/.installed
$(VENV)/.installed: setup.cfg constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "Sluice needs Python 3.11 or later; this is %d.%d: make PYTHON=python3.11" % v[:2])'
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) -e .
	touch $@

$(VENV)/.tests: $(VENV)/.installed
	$(PIP) -e '.[tests,formats]'
	touch $@

check: $(VENV)/.tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

count: $(VENV)/.installed
	@$(BIN)/python -m tests.support.count

generated: $(VENV)/.installed
	$(BIN)/python submit.py schema > configs/schema.json
	SLUICE_DOCSTRINGS=1 $(BIN)/python -m pipeline.config.schema > docs/config.md

format: $(VENV)/.tests
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Run four test files at a time on two cores, because many tests mostly wait.
PYTEST := $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder
test: check
	$(PYTEST)

test-cluster: $(VENV)/.tests
	$(PYTEST) -m "story and not long"

test-long: check $(if $(LM_EVAL_PYTHON),,.venv-lm-eval/.installed)
	LM_EVAL_PYTHON=$(or $(LM_EVAL_PYTHON),$(CURDIR)/.venv-lm-eval/bin/python) $(PYTEST) -m "not gpu_fake"
	$(MAKE) test-mpich test-debian13

test-gpu-fake: $(VENV)/.tests $(if $(CUDA_PYTHON),,.venv-cuda/.installed)
	CUDA_PYTHON=$(or $(CUDA_PYTHON),$(CURDIR)/.venv-cuda/bin/python) \
		$(BIN)/python -m pytest -m gpu_fake tests/train

test-mpich: check .venv-mpich/.installed
	.venv-mpich/bin/python -m pytest -m "not gpu_fake" tests/mpi tests/slurm/supervise/test_mpi_launch.py

# Each of these environments uses the packages of .venv and one more package: mpich or lm-eval. mpi4py finds the MPI
# library in the environment of its Python, and therefore uses mpich in .venv-mpich.
.venv-mpich/.installed: INSTALL = --no-deps mpich==5.0.2
.venv-lm-eval/.installed: INSTALL = -c constraints.txt lm-eval[hf]==0.4.13
.venv-mpich/.installed .venv-lm-eval/.installed: $(VENV)/.tests
	$(BIN)/python -m venv $(@D)
	echo "import site; site.addsitedir('$$(realpath $(VENV)/lib/python*/site-packages)')" > \
		$$(echo $(@D)/lib/python*/site-packages)/venv.pth
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(@D)/bin/pip install --quiet $(INSTALL)
	touch $@

# Install the CUDA build of the oldest supported torch. The default package index has this build.
.venv-cuda/.installed: setup.cfg
	$(PYTHON) -m venv .venv-cuda
	PIP_DISABLE_PIP_VERSION_CHECK=1 .venv-cuda/bin/pip install --quiet torch==2.11.0 psutil -e '.[mpi]'
	touch $@

test-debian13: check
	tests/cluster/debian13.sh $(PYTEST) -m "not long and not gpu_fake" \
		$$(grep -rlE 'tests\.(cluster|chaos)' --include='test_*.py' tests)

bench: $(VENV)/.tests
	$(BIN)/python -m benchmarks.login
	$(BIN)/python -m benchmarks.loader
	$(BIN)/python -m benchmarks.trainer
	$(BIN)/python -m benchmarks.checkpoint
	$(BIN)/python -m benchmarks.snapshots
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.attention
	$(BIN)/python -m benchmarks.context
	$(BIN)/python -m benchmarks.balance
	$(BIN)/python -m benchmarks.packing
	$(BIN)/python -m benchmarks.parity
	$(BIN)/python -m benchmarks.submit
	$(BIN)/python -m benchmarks.comm
	$(BIN)/python -m benchmarks.convergence
	$(BIN)/python -m benchmarks.convergence states
	$(BIN)/python -m benchmarks.convert # needs 26 GB of disk while it runs
	$(BIN)/python -m benchmarks.seeing
	$(BIN)/python -m benchmarks.recovery # needs root and Slurm, as the next benchmark
	$(BIN)/python -m benchmarks.restart

cluster: $(VENV)/.tests
	.ci/install-packages
	$(BIN)/python -m tests.cluster up $(ARGS)

cluster-down:
	$(BIN)/python -m tests.cluster down

clean:
	rm -rf $(VENV) .venv-cuda .venv-mpich .venv-lm-eval build *.egg-info
