# One door: `make` says what there is.
PREFIX = /usr/local
CARGO = cargo

help:
	@echo 'make build    the release binary, target/release/spillway'
	@echo 'make check    formatting, lints, documentation, scripts; changes nothing'
	@echo 'make test     all tests; installs what they need first (end-to-end tests need root)'
	@echo 'make e2e      the end-to-end tests alone: real programs under the release build'
	@echo 'make chaos    servers of a pool with parity killed, cut off and stopped beside real programs (needs root)'
	@echo 'make bench    spillway against native speed and the kernel'"'"'s zram swap, in turn (needs root)'
	@echo 'make bench-ab BASE=REV  this build against that of another revision, in one run (needs root)'
	@echo 'make bench-apps         applications with 75, 50 and 25 % of their memory; writes docs/bench/RESULTS.md (needs root)'
	@echo 'make demo     a real program in a quarter of its memory, in about 20 seconds (needs root)'
	@echo 'make install  the binary into $$(DESTDIR)$$(PREFIX)/bin; PREFIX is $(PREFIX)'

build:
	$(CARGO) build --release --bin spillway

# Who is root has what tests need, by then: what lacks is a failure.
STRICT = $(if $(filter 0,$(shell id -u)),SPILLWAY_TESTS_STRICT=1)

# Many tests wait for servers and deadlines: four at a time for each CPU.
WAITING = $$((4 * $$(nproc)))

# Behind what else is built: the last minute of the release build is one thread's, and leaves a CPU to this.
build-tests:
	nice -n 19 $(CARGO) test --workspace --no-run

check:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS=-Dwarnings $(CARGO) doc --workspace --no-deps --document-private-items
	scripts/check-scripts

# Crates are tested with debug assertions and overflow checks; programs under the binary that is shipped. Both are built at the same
# time: each leaves a CPU idle for a while.
test:
	$(MAKE) -j2 build build-tests
	@if [ "$$(id -u)" = 0 ]; then scripts/setup-tests; fi
	$(STRICT) RUST_TEST_THREADS=$${RUST_TEST_THREADS:-$(WAITING)} $(CARGO) test --workspace
	scripts/e2e
	SPILLWAY_CHAOS_SECONDS=180 TESTS=tests/e2e/chaos.py scripts/e2e

e2e: build
	@if [ "$$(id -u)" = 0 ]; then scripts/setup-tests; fi
	scripts/e2e $(ARGS)

chaos: build
	@if [ "$$(id -u)" = 0 ]; then scripts/setup-tests; fi
	TESTS=tests/e2e/chaos.py scripts/e2e -s $(ARGS)

bench: build
	bench/run $(ARGS)

bench-ab: build
	@[ -n '$(BASE)' ] || { echo 'bench-ab: which revision? make bench-ab BASE=HEAD~1' >&2; exit 2; }
	scripts/bench-ab '$(BASE)' $(ARGS)

bench-apps: build
	bench/apps --record $(ARGS)

# A machine that has only what builds this gets what the demonstration runs.
demo: build
	@command -v python3 >/dev/null || { apt-get update -q && apt-get install -y -q --no-install-recommends python3; } >&2 || \
	    { echo 'demo: the program that it runs is CPython. Install python3, and type it again' >&2; exit 1; }
	@scripts/demo

install: build
	install -D -m 755 target/release/spillway '$(DESTDIR)$(PREFIX)/bin/spillway'

.PHONY: help build build-tests check test e2e chaos bench bench-ab bench-apps demo install
