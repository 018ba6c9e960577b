# Two commands do everything on a fresh clone: `make demo` and `make test`. Both set up .venv first if it is not there.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ARGS ?=
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Demo and tests start many processes that import the same modules: what they compile is kept, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=
# Installs promptfed with $$extras by uv, which takes a third of pip's time, or by pip where uv is not to be had or fails.
# uv reads none of pip's settings. Those that say where packages are (the index, further ones, folders) and the certificates
# are handed on, with pip's choice of the best version of all places; where no-index or trusted-host is set, pip does it.
define install
settings=$$($(PIP) config list 2>/dev/null); \
setting() { for place in :env: install global; do \
  value=$$(printf '%s\n' "$$settings" | sed -n "s/^$$place\.$$1=['\"]\(.*\)['\"]\$$/\1/p" | sed 's/\\n/ /g'); \
  [ -z "$$value" ] || { printf '%s\n' "$$value"; break; }; done; }; \
index=$${UV_DEFAULT_INDEX:-$$(setting index-url)}; more=$${UV_INDEX:-$$(setting extra-index-url)}; \
cert=$${SSL_CERT_FILE:-$$(setting cert)}; folders=$$UV_FIND_LINKS; \
[ -n "$$folders" ] || for folder in $$(setting find-links); do \
  case $$folder in "~"/*) folder=$$HOME/$${folder#??};; esac; path=$${folder#file://}; \
  case $$path in *://*) ;; *) [ -e "$$path" ] || continue;; esac; folders=$${folders:+$$folders,}$$folder; done; \
echo "installing promptfed[$$extras]"; \
{ [ -z "$$(setting no-index)$$(setting trusted-host)" ] && $(PIP) install -q -c constraints.txt uv && \
  env $${index:+UV_DEFAULT_INDEX="$$index"} $${more:+UV_INDEX="$$more"} \
    UV_INDEX_STRATEGY="$${UV_INDEX_STRATEGY:-unsafe-best-match}" \
    $${folders:+UV_FIND_LINKS="$$folders"} $${cert:+SSL_CERT_FILE="$$cert"} \
    $(BIN)/uv pip install -q --python $(BIN)/python -c constraints.txt -e ".[$$extras]"; } || \
{ echo "uv did not do it: pip takes over"; $(PIP) install -q -c constraints.txt -e ".[$$extras]"; }
endef
# Processes that tests run in; those of one file stay together. Many tests wait for others' processes, so three keep two cores busy.
WORKERS ?= 3

.PHONY: demo test test-all extras test-faults test-docker lint setup docs axe pictures figures mutants bench backbone lock build-tools sbom dist release clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt $(wildcard requirements/*.txt)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "promptfed needs Python 3.11 or later: make PYTHON=/path/to/python")'
	$(PYTHON) -m venv $(VENV)
	@extras=test; $(install)
	@# uv compiles nothing: what every service imports is compiled here, once, and not by five processes at the same time.
	@$(BIN)/python -c 'import promptfed.cli.main, promptfed.client_service.worker, promptfed.coordinator.app, open_clip'
	@touch $@

demo: $(READY)
	$(BIN)/promptfed demo $(ARGS)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy -p promptfed -p benchmarks -p tests
	$(BIN)/lint-imports --no-cache --no-logo

PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# The first tier: three minutes on two quiet cores. Lint, types, contracts, unit tests, equations, one federation, one crash.
test: lint
	$(PYTEST) -m 'not slow and not extended' $(ARGS)

# Then the second tier, with the extras that some of its tests want: the documentation, experiment trackers.
EXTRAS := docs,mlflow,tensorboard,build,transformers,medical
test-all: test extras
	$(PYTEST) --extras=$(EXTRAS) -m 'extended and not slow' $(ARGS)

extras: $(READY)
	@extras=test,$(EXTRAS); $(install)
	@if command -v npm >/dev/null; then $(MAKE) -s axe || echo 'no axe-core: the pages are not checked with it'; fi

# The third tier: kills, attacks and partitions at length, two files at a time. Called again, it goes on with the files
# that have not passed at this commit; their logs are in build/faults. ARGS='-k campaign' runs one part.
FAULTS = build/faults/$$(git describe --always --dirty --abbrev=12 --exclude='*')
test-faults: $(READY)
ifneq ($(ARGS),)
	$(BIN)/python -m pytest -m slow -s $(ARGS)
else
	@mkdir -p $(FAULTS)
	@grep -rl --include='test_*.py' 'pytest\.mark\.slow' tests | sort | xargs -P 2 -I FILE sh -c ' \
	  log=$(FAULTS)/$$(echo FILE | tr / -); began=$$(date +%s); what=FAILED; \
	  [ ! -e $$log.passed ] || { echo "passed before: FILE"; exit 0; }; \
	  $(BIN)/python -m pytest -m slow FILE > $$log.log 2>&1 && mv $$log.log $$log.passed && what=passed; \
	  echo "$$what in $$(($$(date +%s) - began)) s: FILE"; [ $$what = passed ]'
endif

test-docker: $(READY)
	$(BIN)/python -m pytest -m docker $(ARGS)

# The pages of docs/ as a site in build/docs; a link that leads nowhere is an error.
docs: $(READY)
	@extras=docs; $(install)
	$(BIN)/python docs/generate.py
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs $(ARGS)

# axe-core, with which tests/web/test_states.py looks for barriers in the pages; it is no part of promptfed.
axe:
	npm install --prefix build/axe --no-save --no-audit --no-fund --ignore-scripts axe-core@4.10.3

# A picture of every state of both pages, light and dark, 1400, 900 and 420 pixels wide, in build/pages.
pictures: $(READY)
	@mkdir -p build/pages
	PROMPTFED_PICTURES=build/pages $(BIN)/python -m pytest -q tests/web/test_states.py

# The size of the code base and of its documents.
figures: $(READY)
	@$(BIN)/python -m benchmarks.figures

# Small faults in the code, drawn by a seed, and the share that the tests notice. Called again, it goes on where it stopped.
# ARGS='shared/privacy --seed 2 --count 50' are other ones; --tier second tries what the first tier has left alive.
mutants: $(READY)
	$(BIN)/python -m benchmarks.mutants $(ARGS)

bench: $(READY)
	$(BIN)/python -m benchmarks.step $(ARGS)
	$(BIN)/python -m benchmarks.simulation
	$(BIN)/python -m benchmarks.coordinator_load

backbone: $(READY)
	$(BIN)/python -m benchmarks.backbone $(if $(OUT),--out $(OUT)) $(ARGS)

# The hashes of every file that an image installs, for the versions of constraints.txt: $(call lock,NAME,LISTS,PACKAGES).
define lock
{ cat requirements/services.txt $(2); printf '%s\n' $(3); } | $(BIN)/uv pip compile -q - -c constraints.txt --generate-hashes \
  --no-header --no-annotate --python-version 3.11 --universal -o requirements/locked/$(1).txt > /dev/null
endef

lock: $(READY)
	@$(PIP) install -q -c constraints.txt uv
	@$(call lock,services)
	@$(call lock,coordinator,requirements/coordinator.txt,'psycopg[binary]' obstore)
	@$(call lock,torch,requirements/torch.txt)
	@$(call lock,client,requirements/torch.txt requirements/client.txt)
	@$(call lock,serve,requirements/torch.txt requirements/client.txt requirements/command.txt)

build-tools: $(READY)
	@extras=build; $(install)

# What is in it, for those who have to look through it: CycloneDX, of this environment and of each image.
# tests/test_wheel.py holds each against the schema, which takes a library of Rust a moment and the tool half a minute.
sbom: build-tools
	@mkdir -p build/sbom
	$(BIN)/cyclonedx-py environment --no-validate --output-reproducible --pyproject pyproject.toml -o build/sbom/environment.cdx.json $(BIN)/python
	@for image in coordinator torch client serve; do $(BIN)/cyclonedx-py requirements --no-validate --output-reproducible \
	  -o build/sbom/$$image.cdx.json requirements/locked/$$image.txt || exit 1; done

# A release in build/dist: sdist, wheel, bills of materials, images where Docker runs, and SHA256SUMS.
# KEY=FILE signs SHA256SUMS with an SSH key; CONTRIBUTING says how that is verified.
DIST ?= build/dist
IMAGES ?= coordinator coordinator-torch client serve
COMMIT = $$(git describe --always --dirty --abbrev=12 --exclude='*')
VERSION = $$($(abspath $(BIN))/python -c 'import promptfed; print(promptfed.__version__)')
dist: sbom
	@rm -rf $(DIST) && mkdir -p $(DIST)
	PROMPTFED_COMMIT=$(COMMIT) $(BIN)/python -m build -q --no-isolation --outdir $(DIST)
	$(BIN)/twine check --strict $(DIST)/*
	@cp build/sbom/*.json $(DIST)
	@if docker version >/dev/null 2>&1; then for image in $(IMAGES); do \
	  tag=promptfed-$$image:$(VERSION); file=$(DIST)/promptfed-$$image-$(VERSION).tar; \
	  docker build -q --target $$image --label org.opencontainers.image.version=$(VERSION) \
	    --label org.opencontainers.image.revision=$(COMMIT) -t $$tag . && \
	  docker save -o $$file $$tag && gzip -n $$file || exit 1; done; \
	else echo 'no images: Docker does not run here'; fi
	@cd $(DIST) && sha256sum * > SHA256SUMS
	@if [ -n '$(KEY)' ]; then ssh-keygen -q -Y sign -f '$(KEY)' -n promptfed $(DIST)/SHA256SUMS; \
	else echo 'not signed: make dist KEY=FILE signs SHA256SUMS with an SSH key'; fi
	@echo "install it: pip install '$(DIST)/promptfed-$(VERSION)-py3-none-any.whl'"
	@echo "with extras: pip install '$(DIST)/promptfed-$(VERSION)-py3-none-any.whl[photos,onnx]' (docs/guides/install.md)"

# What a release needs, checked: a version and its line in the changelog, a clean checkout, all images, a bill of materials for
# each, digests, a signature that holds, and the wheel at work in an empty environment. Uploading is a person's.
release:
	@[ -n '$(KEY)' ] || { echo 'a release is signed: make release KEY=FILE, an SSH key'; exit 1; }
	@[ -z "$$(git status --porcelain)" ] || { echo 'the checkout has changes that are not committed'; exit 1; }
	@$(MAKE) -s setup
	@grep -q "^## $(VERSION) ([0-9-]*)$$" CHANGELOG.md || \
	  { echo "CHANGELOG.md has no line '## $(VERSION) (YEAR-MONTH-DAY)'"; exit 1; }
	@$(MAKE) dist
	@for image in $(IMAGES); do [ -e $(DIST)/promptfed-$$image-$(VERSION).tar.gz ] || \
	  { echo "no image $$image: a release is made where Docker runs"; exit 1; }; done
	@cd $(DIST) && sha256sum --quiet -c SHA256SUMS && echo "release@promptfed $$(cut -d' ' -f1,2 '$(abspath $(KEY)).pub')" > .signers && \
	  ssh-keygen -q -Y verify -f .signers -I release@promptfed -n promptfed -s SHA256SUMS.sig < SHA256SUMS; ok=$$?; rm .signers; exit $$ok
	@rm -rf build/empty && $(PYTHON) -m venv build/empty && cd build/empty && \
	  bin/pip install -q --disable-pip-version-check $(abspath $(DIST))/promptfed-$(VERSION)-py3-none-any.whl && \
	  bin/promptfed --version && bin/promptfed demo --data digits --rounds 2
	@echo "ready, not uploaded: $(BIN)/twine upload $(DIST)/promptfed-$(VERSION)*.whl $(DIST)/promptfed-$(VERSION).tar.gz"

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
