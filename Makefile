# make demo   install, then train on real text with two processes, stop, resume, and write the page of the run
# make test   install, then lint, type-check and run the units and one case of each path through the system: four minutes on
#           two cores
# make test-all   everything: a real Slurm, every cell of the tables, SageMaker's SDKs, SMP's versions, a soak of kills
# make test-sagemaker   the tests against SageMaker's SDK v2 and v3, each in an environment of its own
# make test-mlflow   the tests against a server of MLflow, in an environment of its own
# make test-smp-container-versions   the SMP backend's tests on torch 2.5.1 and transformers 4.44.2, in .venv-smp, and
#           a run that goes from there to today's versions and back
# make test-torch-versions   the native backend on each release of torch from 2.8 on, and what a GPU is measured by, each in
#           an environment that is deleted afterwards; TORCH_VERSIONS="2.8.0/4.50.3" selects releases
# make test-cuda-dry   what runs on GPUs alone, without one: process groups, copies, and every kernel compiled, on the oldest and the
#           newest torch for CUDA, in .venv-cuda; TORCH_FOR_CUDA=2.8.0 for one of them
# make test-table   every cell of the table in docs/parallelism.md, and a kill at every stage of a save
# make venv   install only; .venv/bin/python is the interpreter it leaves behind

PYTHON ?= python3
PY := .venv/bin/python
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-all test-table test-sagemaker test-torch-versions test-cuda-dry test-mlflow test-smp-container-versions venv lint fast clean

venv: .venv/.installed

# Re-made when what is to be installed changes, and only then.
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("smp-train needs Python 3.10 or newer; set PYTHON=python3.x")'
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt setuptools wheel
	$(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: venv
	$(PY) launchers/local/demo.py

lint: venv
	$(PY) -m ruff check .
	$(PY) -m mypy

# Three workers for the two cores asked for: one of them often waits for a process that ends. By file, as the tests of one
# share what is expensive to make: a Slurm, trained models.
PYTEST := $(PY) -m pytest --durations 15 -p tests.cpu_time --numprocesses 3 --dist loadfile --no-loadscope-reorder

# Both at once, as mypy keeps one core busy for half a minute.
test: venv
	$(MAKE) --no-print-directory --jobs 2 lint fast

fast: venv
	$(PYTEST) -m 'not slow or core'

test-all: lint
	SMP_TRAIN_WHOLE_TABLE=1 $(PYTEST)
	$(MAKE) test-sagemaker test-mlflow test-smp-container-versions test-torch-versions test-cuda-dry
	$(PY) -m tests.soak --kills 50
	$(PY) -m tests.soak --kills 50 --place s3
	$(PY) -m tests.soak_recovery --kills 50

test-table: venv
	SMP_TRAIN_WHOLE_TABLE=1 $(PY) -m pytest tests/distributed/test_same_numbers.py tests/distributed/test_checkpoints_killed.py

.venv-sagemaker/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-sagemaker
	.venv-sagemaker/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[sagemaker]' \
		'sagemaker==2.257.7' 'sagemaker-training==5.1.4' 'moto[iam,s3,sagemaker,server,sts]==5.2.5' pytest pytest-timeout
	touch $@

.venv-sagemaker-v3/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-sagemaker-v3
	.venv-sagemaker-v3/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[sagemaker-v3]' \
		'sagemaker-train==1.27.0' 'moto[iam,s3,sagemaker,sts]==5.2.5' pytest pytest-timeout
	touch $@

test-sagemaker: venv .venv-sagemaker/.installed .venv-sagemaker-v3/.installed
	SMP_TRAIN_PYTHON=$(abspath $(PY)) .venv-sagemaker/bin/python -m pytest tests/sagemaker
	SMP_TRAIN_PYTHON=$(abspath $(PY)) .venv-sagemaker-v3/bin/python -m pytest tests/sagemaker

# MLflow with its server is nearly a gigabyte; the package's own part needs no torch.
.venv-mlflow/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-mlflow
	.venv-mlflow/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[mlflow]' 'mlflow==3.17.2' tqdm \
		pytest pytest-timeout
	touch $@

test-mlflow: .venv-mlflow/.installed
	.venv-mlflow/bin/python -m pytest tests/mlflow

# The versions of SMP v2's last container, Python's too. Gigabytes: torch 2.5.1 brings CUDA's libraries with it.
.venv-smp/.installed: pyproject.toml Makefile
	$(PYTHON) -c 'import sys; sys.version_info[:2] == (3, 11) or sys.exit("SMP v2 runs on Python 3.11; set PYTHON=python3.11")'
	$(PYTHON) -m venv .venv-smp
	.venv-smp/bin/python -m pip install --quiet --disable-pip-version-check 'torch==2.5.1' 'transformers==4.44.2' 'numpy<2' \
		pyyaml packaging tokenizers safetensors orjson isal tqdm psutil 'accelerate==1.2.1' pytest pytest-timeout hypothesis
	.venv-smp/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

test-smp-container-versions: venv .venv-smp/.installed
	.venv-smp/bin/python -m pytest tests/distributed/test_smp*.py tests/distributed/test_backend.py tests/unit/test_smp*.py
	$(PY) -m pytest tests/distributed/test_container_versions.py

# TORCH/TRANSFORMERS. The GPU machine has torch 2.11 with transformers 5.17.
TORCH_VERSIONS ?= 2.8.0/4.50.3 2.9.1/4.57.6 2.10.0/5.6.0 2.11.0/5.17.0 2.12.1/5.20.2 2.13.0/5.21.1 2.14.1/5.22.2 2.15.0/5.23.0
TORCH_TESTS := $(patsubst %,tests/unit/test_%.py,models_changes models_hf_weights models_initialization models_resolve mesh \
	activations losses attention checkpoints) \
	$(patsubst %,tests/distributed/test_%.py,same_numbers resume activations expert_parallel router_loss steps dropout \
	planning_work torch_releases cuda_groups rebind recovery)

# A release that fails does not end the others.
test-torch-versions:
	set -e; trap 'rm -rf .venv-torch' EXIT; trap 'exit 130' INT TERM; failed=; for pair in $(TORCH_VERSIONS); do \
		rm -rf .venv-torch; $(PYTHON) -m venv .venv-torch; more=; \
		case $$pair in 2.11.*) more=tests/distributed/test_bench_gpu.py;; esac; \
		.venv-torch/bin/python -m pip install --quiet --disable-pip-version-check "torch==$${pair%/*}" \
			"transformers==$${pair#*/}" --editable '.[train,hf,lora]' accelerate boto3 psutil pytest pytest-timeout hypothesis && \
		.venv-torch/bin/python -m pytest -p tests.cpu_time -m 'not slow or core or release' $(TORCH_TESTS) $$more || \
			failed="$$failed $$pair"; \
	done; test -z "$$failed" || { echo "failed on torch/transformers:$$failed"; exit 1; }

# One release at a time: each brings 7 GB of CUDA's libraries.
TORCH_FOR_CUDA ?= 2.8.0 2.15.0

test-cuda-dry:
	set -e; trap 'rm -rf .venv-cuda' EXIT; trap 'exit 130' INT TERM; for torch in $(TORCH_FOR_CUDA); do \
		rm -rf .venv-cuda; $(PYTHON) -m venv .venv-cuda; \
		.venv-cuda/bin/python -m pip install --quiet --disable-pip-version-check "torch==$$torch" 'transformers>=5.17' \
			--editable '.[train]' accelerate psutil pytest pytest-timeout hypothesis setuptools; \
		.venv-cuda/bin/python -m pytest tests/distributed/test_cuda_groups.py tests/cuda; \
		.venv-cuda/bin/python -m tests.cuda.kernels; \
	done

clean:
	rm -rf .venv .venv-cuda .venv-torch .venv-sagemaker .venv-sagemaker-v3 .venv-smp .venv-mlflow build dist demo *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
