# What one runs, by name; each line is a script that also runs by itself.
.PHONY: help smoke test all docs bench wheels

help: ## what there is
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

smoke: ## lint and the core's logic, in a minute
	bash scripts/test.sh --smoke

test: ## before a commit: lint, types, import rules, docs, fast tests
	bash scripts/test.sh

all: ## every test, as CI runs them
	bash scripts/test.sh --all

docs: ## the pages as a site, in out/site
	bash -c 'source scripts/venv.sh && seko_make_venv dev && "$$PYTHON" -m mkdocs build --strict'

bench: ## figures of this machine's GPU: make bench CASES="peers lingbot"
	bash scripts/gpu/benchmarks.sh $(CASES)

wheels: ## wheels and sdists of the four distributions, in dist
	bash scripts/wheels.sh
