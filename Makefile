# rfaas: functions executed by remote memory write. `make help` lists the targets.
#
# Go keeps track of its own dependencies, so Go targets always ask `go build`, which does nothing when nothing
# changed. C programs are rebuilt when a source, a header, the list of sources or a flag has changed.

SHELL := /bin/bash
, := ,
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

PREFIX ?= /usr/local
LIB ?= lib#      the directory of libraries below PREFIX
DESTDIR ?=
MPI ?= openmpi# openmpi, mpich, or none to build without the MPI examples
V ?=#            1: print the commands
BENCH_ARGS ?=#   options of scripts/bench

GO ?= go
CC := $(if $(filter default,$(origin CC)),gcc,$(CC))
CXX := $(if $(filter default,$(origin CXX)),g++,$(CXX))
FC := $(if $(filter default,$(origin FC)),gfortran,$(FC))
Q := $(if $(filter 1,$(V)),,@)
# $(call say,VERB,WHAT): one line for each target.
SILENT := $(findstring s,$(filter-out --%,$(firstword -$(MAKEFLAGS))))
say = @$(if $(SILENT),:,printf '  %-8s %s\n' '$(1)' '$(2)')

# The version: the tag v1.2.3 without its v, else the commit. In a release archive, which has no git, it is in the file VERSION.
VERSION := $(patsubst v%,%,$(shell git describe --tags --match 'v[0-9]*' --always --dirty 2>/dev/null || cat VERSION 2>/dev/null || echo unknown))
SONAME := librfaas.so.0
# The time of the commit, for files that contain a time. A release archive has it in the file RELEASE, after the version of its packages.
export SOURCE_DATE_EPOCH := $(or $(SOURCE_DATE_EPOCH),$(shell git log -1 --format=%ct 2>/dev/null || sed -n 2p RELEASE 2>/dev/null || echo 0))

DP := internal/dataplane
WORKER := worker
CFLAGS ?= -O2 -g
NO_PATHS := -ffile-prefix-map=$(CURDIR)=.
# Warnings are errors in CI and in lint only, so that warnings of a newer compiler do not stop a user.
DP_CFLAGS := -std=gnu11 -D_GNU_SOURCE -Wall -Wextra -pthread -I$(DP) -Iclient/c -I. $(NO_PATHS) $(if $(filter true 1,$(CI)),-Werror) $(CPPFLAGS)
DP_LIBS := -ldl
SANITIZE := -O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined
SANITIZE_THREAD := -O1 -g1 -fno-omit-frame-pointer -fsanitize=thread -Wno-tsan
GO_LDFLAGS := -X main.version=$(VERSION)
# The version is passed by the linker: go's own stamping fails in a clone that belongs to another user.
GO_BUILD = $(GO) build -buildvcs=false
# Programs do not contain the path of the tree that they were built in. Tests have the same flag, so that they share compiled packages
# with the programs.
export GOFLAGS := -trimpath $(filter-out -trimpath,$(GOFLAGS))

.PHONY: help
help: ## this list
	@printf 'rfaas %s\n\n' '$(VERSION)'
	@sed -n 's/^\([a-z][a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile | while IFS=$$'\t' read -r target text; do \
		printf '  make %-14s %s\n' "$$target" "$$text"; done
	@printf '\nVariables: V=1 shows the commands; MPI=openmpi|mpich|none; PREFIX=%s and DESTDIR for install.\n' '$(PREFIX)'

# ---------------------------------------------------------------------------------------------- using it

.PHONY: deps run demo-two-nodes bench bench-seeds soak chaos headline headline-table
deps: ## install the packages that are missing (as root or by sudo), or say which
	$(Q)scripts/deps

run: ## build and run the demonstration: an MPI program that offloads work
	$(Q)scripts/deps run
	$(Q)mkdir -p build # two of these at the same time build one after the other
	+$(Q)flock build/lock $(MAKE) --no-print-directory run-parts
	$(Q)scripts/demo

demo-two-nodes: ## the same with the executor in a separate network namespace, as on another node, over TCP (as root)
	$(Q)((EUID == 0)) || { echo 'make demo-two-nodes makes network namespaces: run it as root' >&2; exit 1; }
	$(Q)scripts/deps two-nodes
	$(Q)mkdir -p build
	+$(Q)flock build/lock $(MAKE) --no-print-directory run-parts
	$(Q)TWO_NODES=1 scripts/demo

bench: build test-programs build/bench-tcp/pingpong ## measure every promise: build/bench/report.md with plots; about thirteen minutes (the Slurm part as root)
	$(Q)scripts/bench $(BENCH_ARGS)

bench-seeds: build test-programs twovm-programs ## print what seeds cost as a table, with the bounds of docs/seeds.md and floors of the same run, also between network namespaces and virtual machines; about six minutes (as root)
	$(Q)echo '| | measured | wanted | | beside it |'; echo '|---|---|---|---|---|'
	$(Q)for p in shm tcp; do \
		RFAAS_TEST_FIGURES=1 RFAAS_TEST_PROVIDER=$$p $(GO) test -p 1 -count=1 -v -vet=off -run "^TestSeed.*$$([ $$p = tcp ] && echo "(Copy|Touched|Table)")Figures" $$([ $$p = tcp ] || echo ./internal/zygote) ./client >build/bench-seeds.log 2>&1 || \
			{ cat build/bench-seeds.log; exit 1; }; \
		grep '^|' build/bench-seeds.log; \
	done
	$(Q)export RFAAS_TEST_FIGURES=1 RFAAS_TEST_PROVIDER=tcp RFAAS_ALLOW_PLAINTEXT=1; cd client && \
		for nodes in "" ../scripts/two-nodes; do $$nodes ../build/twovm/client.test -test.run '^TestSeedJoins$$' | grep '^|'; done
	$(Q)$(TWOVM) -e RFAAS_TEST_FIGURES=1 -- tests/run --twovm figures -- $(TWOVM_SECOND) | sed -n 's/^a: |/|/p'

soak: build test-programs build/bench-tcp/pingpong ## bench, and longer tests: a thousand kills, 100 kills each of agents and clients, a race of 1000 clients, 10 minutes of attacks, 100 link outages, a real Slurm (as root); 35 minutes more
	$(Q)scripts/bench --soak $(BENCH_ARGS)

# The CHAOS_* variables can also be set in the environment. Seed 0 chooses a new seed and prints it.
CHAOS_SEED ?= 0
CHAOS_DURATION ?= 5m
CHAOS_KILLS ?= 150
CHAOS_DAMAGES ?= 5
CHAOS_RESTARTS ?= 5
CHAOS_LEASES ?= 100
chaos: build test-programs ## 150 kills and stops of everything, full disks, damaged files, manager restarts under 100 leases, bills against audit lines, and clock steps in a virtual machine; at most 10 minutes (CHAOS_SEED=..., CHAOS_DURATION=5m)
	$(Q)$(in_faults_vm) --timeout 90 -- ../../build/gotest-faults/faults.test -test.v -test.run 'TestClockJumps$$'
	$(Q)$(GO) test -count=1 -v -vet=off -timeout 500s -run 'TestChaos$$' ./tests/faults -seed $(CHAOS_SEED) -chaos-duration $(CHAOS_DURATION) \
		-chaos-kills $(CHAOS_KILLS) -chaos-damages $(CHAOS_DAMAGES) -chaos-restarts $(CHAOS_RESTARTS) -chaos-leases $(CHAOS_LEASES)

# Builds the tests of tests/faults and runs a command there in a virtual machine with a verbs device.
in_faults_vm = mkdir -p build/gotest-faults && $(GO) test -c -o build/gotest-faults/ ./tests/faults && \
	cd tests/faults && ../../scripts/softroce/run -e RFAAS_REQUIRE_VERBS=1

headline: build ## measure what README's table shows, about three minutes (BENCH_ARGS=--again: anew), and write the table
	$(Q)scripts/bench --headline $(BENCH_ARGS)

headline-table: programs # README's table and plot from benchmarks/headline as it is
	$(Q)bin/rfaas bench report --readme README.md benchmarks/headline

# ---------------------------------------------------------------------------------------------- building

.PHONY: build programs spawner agent worker library headers examples
build: programs bin/rfaas-cc worker library headers man fortran python demo-program examples pingpongs ## everything: bin, libexec, lib, include and the examples

PROGRAMS := executor resource-manager rfaas rfaas-bench

# $(call unless_same,FILE): writes standard input to FILE unless FILE already has this content.
unless_same = { mkdir -p $(dir $(1)); cat >$(1).new; if cmp -s $(1).new $(1); then rm -f $(1).new; else mv -f $(1).new $(1); fi; }

.PHONY: FORCE
FORCE:

# bin/executor, bin/resource-manager, bin/rfaas, bin/rfaas-bench, with libexec/rfaas-worker, rfaas-spawner and rfaas-agent of the same
# version.
programs: worker spawner agent
	$(call say,GO,bin/)
	$(Q)mkdir -p bin
	$(Q)$(GO_BUILD) -ldflags '$(GO_LDFLAGS)' -o bin/ $(PROGRAMS:%=./cmd/%)
bin/rfaas bin/rfaas-bench: programs
	@:

bin/rfaas-cc: scripts/rfaas-cc build/version
	$(call say,COPY,$@)
	$(Q)mkdir -p $(@D)
	$(Q)sed 's|@VERSION@|$(VERSION)|' $< >$@ && chmod 755 $@

# The part of an executor that stays root. It is built without cgo, so that no C library is loaded into it.
spawner: # libexec/rfaas-spawner
	$(call say,GO,libexec/rfaas-spawner)
	$(Q)mkdir -p libexec
	$(Q)CGO_ENABLED=0 $(GO_BUILD) -ldflags '$(GO_LDFLAGS)' -o libexec/rfaas-spawner ./cmd/rfaas-spawner

agent: # libexec/rfaas-agent, which client processes start
	$(call say,GO,libexec/rfaas-agent)
	$(Q)mkdir -p libexec
	$(Q)$(GO_BUILD) -ldflags '$(GO_LDFLAGS)' -o libexec/rfaas-agent ./cmd/rfaas-agent

# $(call c_program,OUTPUT,OBJECT DIRECTORY,SOURCES,FLAGS,LINK FLAGS): objects in their own directory, remade when
# sources, included headers or the flags change.
define c_program
$(1): $(patsubst %.c,$(2)/%.o,$(3)) $(2)/flags
	$$(call say,LD,$$@)
	$$(Q)mkdir -p $$(@D)
	$$(Q)$$(CC) $(4) -o $$@ $$(filter %.o,$$^) $(5) $$(LDFLAGS) $$(DP_LIBS)

$(2)/%.o: %.c $(2)/flags
	$$(call say,CC,$$<)
	$$(Q)mkdir -p $$(@D)
	$$(Q)$$(CC) $(4) $$(VERSION_FLAG) -MMD -MP -c -o $$@ $$<

$(2)/flags: FORCE
	@printf '%s\n' '$$(CC) $(4) $(5) $$(LDFLAGS)' $(3) | $$(call unless_same,$$@)

-include $(patsubst %.c,$(2)/%.d,$(3))
endef

DP_SOURCES := $(sort $(wildcard $(DP)/dp_*.c))
# The worker without main(), for tests.
WORKER_PARTS := $(filter-out $(WORKER)/main.c,$(sort $(wildcard $(WORKER)/*.c $(WORKER)/seed/*.c $(WORKER)/startup/*.c)))
CTEST_SOURCES := $(sort $(wildcard tests/c/*.c)) $(filter-out client/c/agent_start.c,$(wildcard client/c/*.c)) $(DP_SOURCES) $(WORKER_PARTS)

# The worker contains only code that it runs, which keeps its clones small.
WORKER_SOURCES := $(WORKER)/main.c $(WORKER_PARTS) $(DP_SOURCES)
BENCH_PEER_SOURCES := $(DP_SOURCES) $(wildcard benchmarks/raw/*.c benchmarks/raw/peer/*.c)

worker: libexec/rfaas-worker libexec/rfaas-bench-peer # libexec/rfaas-worker, and the peer of `rfaas bench`
$(eval $(call c_program,libexec/rfaas-worker,build/worker,$(WORKER_SOURCES),$(DP_CFLAGS) $(CFLAGS),-rdynamic))
$(eval $(call c_program,libexec/rfaas-bench-peer,build/bench-peer,$(BENCH_PEER_SOURCES),$(DP_CFLAGS) $(CFLAGS),))
build/worker/$(WORKER)/main.o: VERSION_FLAG := -DRFAAS_VERSION='"$(VERSION)"'
build/worker/$(WORKER)/main.o: build/version
build/worker/$(WORKER)/runtime.o: client/python/rfaas/_frames.py client/python/rfaas/_remote.py
build/version: FORCE
	@echo '$(VERSION)' | $(call unless_same,$@)

# Compares the tcp provider with a bare pair of sockets.
BENCH_TCP_SOURCES := $(DP_SOURCES) benchmarks/tcp/main.c
$(eval $(call c_program,build/bench-tcp/pingpong,build/bench-tcp,$(BENCH_TCP_SOURCES),$(DP_CFLAGS) $(CFLAGS),))

# The library exports only what rfaas.h declares. An MPI program may have dp_ functions of its own. The functions of
# rfaas_function.h must stay undefined in a client, because a library of functions recognizes by their absence that it runs as a
# local fallback.
CLIENT := client/c
LIBRARY_SOURCES := $(sort $(wildcard $(CLIENT)/*.c)) $(filter-out $(DP)/dp_serve% $(DP)/dp_broker%,$(DP_SOURCES))
LIBRARY_CFLAGS := $(DP_CFLAGS) $(CFLAGS) -fPIC -fvisibility=hidden
LIBRARY_LDFLAGS := -shared -Wl,-soname,$(SONAME) -Wl,--version-script=build/librfaas.map -Wl,-z,defs -Wl,--strip-debug
library: lib/librfaas.so # lib/librfaas.so
lib/librfaas.so: lib/$(SONAME)
	$(Q)ln -sfn $(SONAME) $@
lib/$(SONAME): build/librfaas.map
$(eval $(call c_program,lib/$(SONAME),build/library,$(LIBRARY_SOURCES),$(LIBRARY_CFLAGS),$(LIBRARY_LDFLAGS)))
build/library/$(CLIENT)/%.o: VERSION_FLAG := -DRFAAS_LIBRARY_VERSION='"$(VERSION)"'
build/library/$(CLIENT)/agent.o: build/version

build/librfaas.map: $(CLIENT)/rfaas.h
	$(Q)mkdir -p $(@D)
	$(Q)names=$$(sed -n 's/^RFAAS_API .*\b\(rfaas_[a-z_]*\)(.*/\1;/p' $<); echo '{ global:' $$names 'local: *; };' >$@

# What is generated from the description of the API (make api) and not kept in git: the Fortran module rfaas_c, rfaas_enums.hpp, and
# section 3 of the manual.
GENERATED := build/generated
$(GENERATED)/made: client/api/rfaas.yaml $(wildcard $(WORKER)/rfaas_function.* $(WORKER)/fortran/*.f90 internal/apigen/*.go internal/apigen/*/*)
	$(call say,API,$(@D)/)
	$(Q)rm -rf $(@D)
	$(Q)$(GO) run -buildvcs=false ./internal/apigen/write built
	$(Q)touch $@
$(addprefix $(GENERATED)/,rfaas_enums.hpp rfaas_c.f90): $(GENERATED)/made
	$(Q)test -e $@ || { rm -f $<; $(MAKE) $<; }

HEADERS := rfaas.h rfaas_function.h rfaas_function.hpp rfaas.hpp rfaas_async.hpp rfaas_span.hpp rfaas_enums.hpp rfaas_mpi.h rfaas_mpi.hpp
headers: $(HEADERS:%=include/%) # include/rfaas*.h, rfaas*.hpp
include/rfaas_mpi.%: client/mpi/rfaas_mpi.%
	$(call say,COPY,$@)
	$(Q)install -D -m 644 $< $@
include/rfaas_function.%: $(WORKER)/rfaas_function.%
	$(call say,COPY,$@)
	$(Q)install -D -m 644 $< $@
include/%.h: $(CLIENT)/%.h
	$(call say,COPY,$@)
	$(Q)install -D -m 644 $< $@
include/rfaas_enums.hpp: $(GENERATED)/rfaas_enums.hpp
	$(Q)install -D -m 644 $< $@
include/%.hpp: client/cpp/%.hpp
	$(call say,COPY,$@)
	$(Q)install -D -m 644 $< $@

# Sections 1 and 8 come from the programs' own descriptions.
.PHONY: man
man: $(GENERATED)/made build/man/rfaas.1
build/man/rfaas.1: bin/rfaas bin/rfaas-bench
	$(call say,MAN,build/man/)
	$(Q)rm -rf $(@D).new && mkdir -p $(@D).new && bin/rfaas man $(@D).new && bin/rfaas-bench man $(@D).new && rm -rf $(@D) && mv $(@D).new $(@D)

# rfaas.h, the Fortran procedures with options, the Go constants, the fields and classes of the Python package, and docs/languages.md.
.PHONY: api
api: ## generate rfaas.h and the other interfaces from client/api/rfaas.yaml
	$(Q)$(GO) run -buildvcs=false ./internal/apigen/write

# The Fortran modules, if there is a Fortran compiler. Only the compiler that wrote a .mod file can read it, so the sources
# are installed too.
FORTRAN := $(if $(shell command -v $(FC) 2>/dev/null),lib/librfaas_fortran.a)
.PHONY: fortran
FORTRAN_MODULES := rfaas_c rfaas_options rfaas_piece_lists rfaas
FORTRAN_SOURCES := $(GENERATED)/rfaas_c.f90 $(addprefix client/fortran/,rfaas_pieces.f90 rfaas.f90 rfaas_pieces.c)
fortran: $(FORTRAN) # lib/librfaas_fortran.a, include/rfaas*.mod
lib/librfaas_fortran.a: $(FORTRAN_SOURCES)
	$(call say,FC,$@)
	$(Q)mkdir -p build/fortran include lib
	$(Q)for f in $(filter %.f90,$(FORTRAN_SOURCES)); do \
		$(FC) -O2 -g $(NO_PATHS) -fPIC -Wall -Jinclude -c -o build/fortran/$$(basename $$f .f90).o $$f || exit; done
	$(Q)$(CC) -std=gnu11 -O2 -g $(NO_PATHS) -fPIC -Wall -Wextra -I$(CLIENT) -c -o build/fortran/rfaas_pieces_c.o client/fortran/rfaas_pieces.c
	$(Q)rm -f $@ && ar rcs $@ $(addprefix build/fortran/,rfaas_c.o rfaas_pieces.o rfaas_pieces_c.o rfaas.o)

# The Python package, if there are CPython 3.11 or later and its header files. The extension uses the limited API, so other versions of
# CPython from 3.11 on load it too. The system's Python is preferred, because the numpy
# of the system is for it.
PYTHON ?= $(or $(firstword $(wildcard /usr/bin/python3.11 /usr/bin/python3)),python3)
PYTHON_PLACES := $(shell $(PYTHON) -c 'import os, sys, sysconfig; at = sysconfig.get_path; \
	found = sys.version_info >= (3, 11) and os.path.exists(at("include") + "/Python.h"); \
	print(*(found and [at("include"), "python%d.%d/%s" % (*sys.version_info[:2], os.path.basename(at("purelib")))] or []))' 2>/dev/null)
PYTHON_FILES := $(if $(PYTHON_PLACES),$(patsubst client/python/%,lib/python/%,$(wildcard client/python/rfaas/*.py client/python/rfaas/*.pyi client/python/rfaas/py.typed)))
PYTHON_EXTENSION := $(if $(PYTHON_PLACES),lib/python/rfaas/_rfaas.abi3.so lib/python/rfaas/_worker.abi3.so)
PYTHON_CFLAGS = $(DP_CFLAGS) $(CFLAGS) -fPIC -fvisibility=hidden -Wno-cast-function-type -DPy_LIMITED_API=0x030b0000 -isystem $(firstword $(PYTHON_PLACES))
.PHONY: python
python: $(PYTHON_EXTENSION) $(PYTHON_FILES) # lib/python/rfaas
$(eval $(call c_program,lib/python/rfaas/_rfaas.abi3.so,build/python,$(sort $(wildcard client/python/ext/*.c)),$(PYTHON_CFLAGS),-shared))
$(eval $(call c_program,lib/python/rfaas/_worker.abi3.so,build/python-worker,client/python/worker/worker.c,$(PYTHON_CFLAGS) -I$(WORKER),-shared))
lib/python/%: client/python/%
	$(call say,COPY,$@)
	$(Q)install -D -m 644 $< $@

# ---------------------------------------------------------------------------------------------- examples

FUNCTIONS := $(patsubst examples/functions/%.c,build/functions/%.so,$(wildcard examples/functions/*.c)) \
	$(if $(FORTRAN),$(patsubst examples/functions/%.f90,build/functions/%.so,$(wildcard examples/functions/*.f90)))
EXAMPLES := build/examples
mpi_programs = $(patsubst examples/mpi/%/,$(EXAMPLES)/%,$(sort $(dir $(wildcard examples/mpi/*/$(1)))))
MPI_PROGRAMS := $(call mpi_programs,*.c)
MPICC ?= $(firstword $(shell command -v mpicc.$(strip $(MPI)) mpicc))
# C++ and Fortran examples are built if there are compilers.
MPICXX ?= $(firstword $(shell command -v mpicxx.$(strip $(MPI)) mpicxx))
MPIFORT ?= $(firstword $(shell command -v mpifort.$(strip $(MPI)) mpifort))
CXX_PROGRAMS := $(if $(and $(shell command -v $(CXX)),$(MPICXX)),$(call mpi_programs,*.cpp))
FORTRAN_PROGRAMS := $(if $(and $(FORTRAN),$(MPIFORT)),$(call mpi_programs,*.f90))
GO_MPI_PROGRAMS := $(call mpi_programs,main.go)
ALL_MPI_PROGRAMS := $(MPI_PROGRAMS) $(CXX_PROGRAMS) $(FORTRAN_PROGRAMS) $(GO_MPI_PROGRAMS)

examples: $(FUNCTIONS) $(if $(filter none,$(MPI)),,$(ALL_MPI_PROGRAMS)) # build/functions/*.so, $(EXAMPLES)/*

# What `rfaas demo` runs: the program of `make run`, for one process.
DEMO_FILES := $(addprefix libexec/rfaas-demo/,blackscholes blackscholes.so options.txt)
.PHONY: demo-program
demo-program: $(DEMO_FILES) # libexec/rfaas-demo
libexec/rfaas-demo/blackscholes: $(wildcard examples/mpi/blackscholes/*.[ch] examples/functions/*.h examples/serial/*.h) | headers library
	$(call say,CC,$@)
	$(Q)mkdir -p $(@D)
	$(Q)$(CC) -std=gnu11 -D_GNU_SOURCE -Wall -Wextra $(CFLAGS) $(NO_PATHS) -Iexamples/serial -Iinclude -Iexamples/functions -o $@ $(filter %.c,$^) \
		-Llib -lrfaas '-Wl,-rpath,$$ORIGIN/../../lib' -lm
libexec/rfaas-demo/blackscholes.so: examples/functions/blackscholes.c examples/functions/blackscholes.h | headers
	$(call say,CC,$@)
	$(Q)mkdir -p $(@D)
	$(Q)$(CC) -Wall -Wextra $(CFLAGS) $(NO_PATHS) -fPIC -shared -Iinclude -o $@ $< -lm
libexec/rfaas-demo/options.txt: examples/mpi/blackscholes/options.txt
	$(call say,COPY,$@)
	$(Q)install -D -m 644 $< $@

.PHONY: run-parts
run-parts: programs library headers $(FUNCTIONS) $(or $(PROGRAM),$(EXAMPLES)/blackscholes) # what scripts/demo uses

build/functions/%.so: examples/functions/%.f90 $(wildcard $(WORKER)/fortran/*) bin/rfaas-cc | headers
	$(call say,FC,$@)
	$(Q)mkdir -p $(@D)
	$(Q)CC='$(CC)' FC='$(FC)' bin/rfaas-cc -std=f2018 -Wall -Wno-unused-dummy-argument -o $@ $<

build/functions/%.so: examples/functions/%.c | headers
	$(call say,CC,$@)
	$(Q)mkdir -p $(@D)
	$(Q)$(CC) -Wall -Wextra $(CFLAGS) $(OPENMP) -fPIC -shared -Iinclude -MMD -MP -o $@ $< -lm
build/functions/mandelbrot.so: private OPENMP := -fopenmp

# One program for each directory of C files. Rebuilt when another MPI is chosen.
$(EXAMPLES)/mpi: FORCE
	@printf '%s\n' '$(MPI) $(MPICC) $(CFLAGS)' | $(call unless_same,$@)

define mpi_program
$(1): $(wildcard examples/mpi/$(notdir $(1))/*.[ch] examples/functions/*.h) $(EXAMPLES)/mpi | headers library
	$$(call say,MPICC,$$@)
	@[[ -n '$$(MPICC)' ]] || { echo 'no mpicc for MPI=$$(MPI): run make deps, set MPICC, or build with MPI=none' >&2; exit 1; }
	$$(Q)$$(MPICC) -std=gnu11 -D_GNU_SOURCE -Wall -Wextra $$(CFLAGS) -Iinclude -Iexamples/functions -o $$@ $$(filter %.c,$$^) \
		-Llib -lrfaas '-Wl,-rpath,$$$$ORIGIN/../../lib' -lm
endef
$(foreach program,$(MPI_PROGRAMS),$(eval $(call mpi_program,$(program))))

EXAMPLE_LINK := -Llib -lrfaas '-Wl,-rpath,$$ORIGIN/../../lib'
$(CXX_PROGRAMS): $(EXAMPLES)/%: examples/mpi/%/main.cpp $(EXAMPLES)/mpi | headers library
	$(call say,MPICXX,$@)
	$(Q)$(MPICXX) -std=c++17 -Wall -Wextra $(CFLAGS) -DOMPI_SKIP_MPICXX -DMPICH_SKIP_MPICXX -Iinclude -o $@ $< $(EXAMPLE_LINK)

# go build checks what has changed.
$(GO_MPI_PROGRAMS): $(EXAMPLES)/%: FORCE
	$(call say,GO,$@)
	$(Q)mkdir -p $(@D)
	$(Q)$(GO_BUILD) $(if $(filter mpich,$(MPI)),-tags mpich) -o $@ ./examples/mpi/$*

$(FORTRAN_PROGRAMS): $(EXAMPLES)/%: examples/mpi/%/main.f90 $(EXAMPLES)/mpi lib/librfaas_fortran.a | library
	$(call say,MPIFORT,$@)
	$(Q)mkdir -p build/fortran/$*
	$(Q)$(MPIFORT) -std=f2018 -Wall -Wextra -O2 -g -Jbuild/fortran/$* -Iinclude -o $@ $< lib/librfaas_fortran.a $(EXAMPLE_LINK)

-include $(FUNCTIONS:.so=.d)

# Ping-pongs of MPI that `rfaas bench others` runs, for each MPI that is installed.
MPI_PINGPONGS := $(foreach mpi,openmpi mpich,$(if $(shell command -v mpicc.$(mpi)),build/bench/pingpong.$(mpi)))
.PHONY: pingpongs
pingpongs: $(MPI_PINGPONGS) $(if $(PYTHON_PLACES),build/bench/python-loop.so)
build/bench/python-loop.so: benchmarks/python/loop.c | headers library # for benchmarks/python/calls.py
	$(call say,CC,$@)
	$(Q)mkdir -p $(@D)
	$(Q)$(CC) -Wall -Wextra $(CFLAGS) -fPIC -shared -Iinclude -o $@ $< -Llib -lrfaas '-Wl,-rpath,$$ORIGIN/../../lib'
build/bench/pingpong.%: benchmarks/others/mpi/pingpong.c
	$(call say,MPICC,$@)
	$(Q)mkdir -p $(@D)
	$(Q)mpicc.$* -std=gnu11 -D_GNU_SOURCE -Wall -Wextra $(CFLAGS) -o $@ $<

# ---------------------------------------------------------------------------------------------- checking

# Packages for the race detector. Packages without shared data between goroutines are left out, because the detector is slow.
RACE_PACKAGES = $(shell $(GO) list ./... 2>/dev/null | grep -v -E '/(client|cmd|examples|benchmarks|invoke|tests/(capi|docs|faults|hostile|leakcheck|remote|slurm|cluster|etcdtest)|internal/(agent/protocol|api|apigen|board|config|conventions|handover|link|systemd|topology))(/|$$)')
# The packages whose tests take longest. They start first, so that none of them runs alone at the end.
RACE_LONG := ./internal/executor ./internal/zygote ./internal/agent ./internal/etcd ./internal/slurm ./internal/cli ./internal/manager
# Tests of the client in which several goroutines use the same lease, session, buffer or queue of events. The other tests concern other
# processes, which the detector does not see, or C code.
RACE_CLIENT := TestInvoke TestInvokeFromManyGoroutines TestManyGoroutinesFewThreads TestSubmit TestDeadlineAndCancel TestBufferPayloads \
	TestReleaseEndsCalls TestKilledWorkerEndsCallsInFlight TestUseAfterClose TestOperationsEndWithTheirContexts TestRenewal TestChanges \
	TestEventOfADeath TestDroppedEventsAreCounted TestDrainUnderLoad TestFailoverOfOtherCalls TestExecutorStopsWithCallsInFlight TestMap \
	TestReduce TestCancelEndsAMap TestCancelEndsAWaitForAWorker TestMapWithoutRequestsIsCancelled TestWaitAny TestPieces TestTyped TestReplace \
	TestKillLate TestLeaseStopsWaiting TestLeaseAcrossExecutors TestFailover
# Packages whose tests also run on verbs, in the virtual machine; of internal/sandbox only those of control groups, which have version 2 there.
SOFTROCE_PACKAGES = $(shell for p in internal/dataplane internal/sandbox internal/executor internal/manager client tests/capi internal/cli benchmarks/latency; do \
	compgen -G "$$p/*_test.go" >/dev/null && echo ./$$p; done || true)

.PHONY: test test-go test-tcp test-race test-c test-c-plain test-c-asan test-c-tsan test-faults test-kills test-hostile test-python test-install test-upgrade test-standby test-packages test-demo test-softroce test-softroce-faults test-softroce-slurm test-twovm check lint lint-go lint-c lint-sh lint-prose
test: ## everything that must pass: all lanes, with a table at the end
	$(Q)tests/run

.PHONY: build-tests
build-tests: build test-programs remote-tests # all that lanes run

# If something cannot be built, only the tests that need it fail. With BUILT=1, which `make test` sets after the build lane has
# passed, nothing is built again.
try_build = $(if $(BUILT),:,$(MAKE) --no-print-directory build-tests || echo 'make build failed; going on with the tests' >&2)

# Lanes whose tests mostly wait consist of several parts, which run at the same time: tests/run chooses make's --jobs.

# A Go test of a package that runs longer than this counts as hanging. In tests/run, the budget of a lane may end it earlier. Where page faults and system
# calls are slow, as in some virtual machines, the longest package takes 290 s beside two others.
HANG := 600s
.PHONY: tried-build
tried-build:
	$(Q)$(try_build)

# What test-race does not run: the other packages, and the tests that are shorter or left out under the race detector. The longest packages
# first, so that none of them runs alone at the end. The other packages of tests/ have lanes of their own.
GO_LONG := TestJournalLosesNothing TestModel TestUnauthenticatedCallsTakeNoMemory TestManyUnauthenticatedConnectionsTakeNoMemory TestFloodOfRequests \
	TestManyLeaseCycles TestThousandMailboxes TestChargesOfACluster TestChargesOverKills TestPlacementAmongTenThousand TestPageInBrowser \
	TestInSandbox TestStartFailures TestUnderMPI
GO_LONG_PACKAGES := ./accounting ./internal/control ./internal/executor ./internal/manager ./internal/zygote ./mpi
# Tests of the client that compare times. They run when the other parts of the lane have ended.
CLIENT_MEASURES := TestGoAddsLittle TestBatchKeepsUpWithC TestChargingCostsCallsNothing
one_of = '^($(subst $() ,|,$(strip $(1))))$$'
.PHONY: test-go-capi-first test-go-capi-second test-go-client test-go-rest test-go-long
test-go: test-go-client test-go-capi-first test-go-capi-second test-go-rest test-go-long ## Go tests that test-race does not run, or runs in a shorter form
	$(Q)$(GO) test -count=1 -vet=off -timeout $(HANG) ./benchmarks/neighbour # its leases end when another program uses their CPUs
	$(Q)$(GO) test -count=1 -vet=off -timeout $(HANG) -run TestFigures ./tests/capi # measures
	$(Q)$(GO) test -count=1 -vet=off -timeout $(HANG) -run $(call one_of,$(CLIENT_MEASURES)) ./client
test-go-client: tried-build
	$(Q)$(GO) test -count=1 -vet=off -timeout $(HANG) -skip $(call one_of,$(CLIENT_MEASURES)) ./client
test-go-capi-first: tried-build
	$(Q)$(GO) test -count=1 -vet=off -timeout $(HANG) -run '^(Test[A-E]|Example)' ./tests/capi
test-go-capi-second: tried-build
	$(Q)$(GO) test -count=1 -vet=off -timeout $(HANG) -skip '^(Test[A-E]|Example|TestFigures$$)' ./tests/capi
test-go-rest: tried-build
	$(Q)$(GO) test -count=1 -vet=off -timeout $(HANG) $(filter-out $(RACE_PACKAGES) %/client %/tests/capi %/tests/faults %/tests/hostile \
		%/tests/remote %/tests/slurm %/tests/cluster %/benchmarks/neighbour,$(shell $(GO) list ./...))
test-go-long: tried-build
	$(Q)$(GO) test -count=1 -vet=off -timeout $(HANG) -run $(call one_of,$(GO_LONG)) $(GO_LONG_PACKAGES)

.PHONY: test-tcp-client test-tcp-nodes test-tcp-core
test-tcp: test-tcp-client test-tcp-nodes test-tcp-core ## all over Ethernet sockets between two network namespaces: conformance, the client's tests, the programs of other languages and MPI, 30 random kills and 10 link outages (as root)
test-tcp-client: tried-build
	$(Q)mkdir -p build/two-nodes && $(GO) test -c -o build/two-nodes/ ./client
	$(Q)tests/run --two-nodes
test-tcp-nodes: tried-build
	$(Q)$(GO) test -count=1 -v -vet=off -timeout $(HANG) -parallel 4 -run 'TestBetweenNodes.*' ./tests/faults
test-tcp-core: build/ctest/dp_test
	$(Q)scripts/two-nodes build/ctest/dp_test --provider tcp $(TCP_PLAIN)
	$(Q)scripts/two-nodes --ipv6 build/ctest/dp_test --provider tcp --encrypt $(ENCRYPTED_PLAIN)

.PHONY: test-race-packages test-race-client
test-race: test-race-packages test-race-client ## Go tests under the race detector
test-race-packages: tried-build
	$(Q)$(GO) test -race -short -count=1 -vet=off -timeout $(HANG) -p 3 $(RACE_LONG) $(filter-out $(RACE_LONG:.%=\%%),$(RACE_PACKAGES))
test-race-client: tried-build
	$(Q)$(GO) test -race -short -count=1 -vet=off -timeout $(HANG) -run $(call one_of,$(RACE_CLIENT)) ./client

# The longest parts first, because the lane runs three of them at a time.
test-c: test-c-asan-shm test-c-tsan-shm test-c-plain-shm test-c-asan-shm-channel test-c-plain-shm-channel test-c-asan-tcp test-c-asan-encrypted test-c-tsan-tcp test-c-plain-ofi ## conformance and unit tests of the C core on shm, ofi and tcp, plain and with sanitizers (tcp plain: make test-tcp)

# On tcp the cases run between two nodes (lane tcp), and with the address sanitizer on loopback: in ENCRYPTED_ASAN with encryption, the others without.
# Cases of the provider tcp itself, which mostly wait, run with both sanitizers only. Of the cases on encrypted connections, one half runs between nodes,
# the other half with the address sanitizer.
ENCRYPTED_PLAIN := $(patsubst %,'%/*',access atomic connect death device inspect load many memory qp recv reset rkey-ptr script wait wire)
TCP_PLAIN := $(ENCRYPTED_PLAIN) 'channel/*' 'read/*' 'write/*'
ENCRYPTED_ASAN := 'channel/*' 'write/*' 'read/*' 'tcp/*'
ASAN_TCP = $(patsubst %,'%/*',$(filter-out channel write read,$(sort $(shell $< --list --provider tcp | cut -d/ -f1))))

# The cases on shm run in two parts, because a single part would take longer than all others of the lane.
SHM_CHANNEL := 'channel/*'
SHM_OTHERS = $(patsubst %,'%/*',$(filter-out channel,$(sort $(shell $< --list --provider shm | cut -d/ -f1))))
.PHONY: test-c-plain-shm test-c-plain-shm-channel test-c-plain-ofi test-c-asan-shm test-c-asan-shm-channel test-c-asan-tcp test-c-asan-encrypted test-c-tsan-shm test-c-tsan-tcp
test-c-plain: test-c-plain-shm test-c-plain-shm-channel test-c-plain-ofi
test-c-plain-shm: build/ctest/dp_test
	$(Q)build/ctest/dp_test --provider shm $(SHM_OTHERS)
test-c-plain-shm-channel: build/ctest/dp_test
	$(Q)build/ctest/dp_test --provider shm $(SHM_CHANNEL)
test-c-plain-ofi: build/ctest/dp_test
	$(Q)build/ctest/dp_test --provider ofi $(OFI_QUICK)
	$(Q)RFAAS_OFI_PROVIDER=tcp:cxi build/ctest/dp_test --provider ofi $(OFI_QUICK_CXI)

# make test-c-ofi runs the rest, which takes two minutes.
OFI_QUICK := '*ofi*' 'load/*' 'access/*-device' 'reset/*@one-device' 'write/source*' 'channel/sizes' 'channel/finish-*' 'channel/shuffle-hot' \
	channel/reserved channel/pieces-refused 'death/atomics*' 'death/idle*'
OFI_QUICK_CXI := 'access/*@one-device' 'write/source*@processes' 'channel/sizes' 'channel/shuffle-hot' 'channel/shuffle-depth-1024'

# With glibc's cache of threads' stacks, memory stays allocated when a thread has ended, and the runner searches each such process for leaks.
DP_TEST_ASAN := GLIBC_TUNABLES=glibc.pthread.stack_cache_size=0 build/ctest/dp_test-asan
test-c-asan: test-c-asan-shm test-c-asan-shm-channel test-c-asan-tcp test-c-asan-encrypted
test-c-asan-shm-channel: build/ctest/dp_test-asan
	$(Q)$(DP_TEST_ASAN) --provider shm $(SHM_CHANNEL)
test-c-asan-shm: build/ctest/dp_test-asan
	$(Q)$(DP_TEST_ASAN) --provider shm $(SHM_OTHERS)
	$(Q)$(GO) test -asan -count=1 -vet=off ./internal/dataplane
test-c-asan-tcp: build/ctest/dp_test-asan
	$(Q)$(DP_TEST_ASAN) --provider tcp $(ASAN_TCP)
test-c-asan-encrypted: build/ctest/dp_test-asan
	$(Q)$(DP_TEST_ASAN) --provider tcp --encrypt $(ENCRYPTED_ASAN)

# The other forms of posts, by the rules of cxi over libfabric's tcp. tcp:efa takes the same path, because tcp does not report how many
# bytes a write with immediate data has written.
OFI_CASES := 'access/*' 'connect/*' 'death/*' 'read/*' 'recv/*' 'reset/*' 'write/*' 'many/*' 'channel/sizes' 'channel/finish-alone' 'channel/shuffle-*' \
	channel/reserved channel/pieces-refused
.PHONY: test-c-ofi
test-c-ofi: build/ctest/dp_test ## conformance and channel tests of the C core on libfabric's tcp, two minutes
	$(Q)build/ctest/dp_test --provider ofi
	$(Q)RFAAS_OFI_PROVIDER=tcp:cxi build/ctest/dp_test --provider ofi $(OFI_CASES)

# shm_limits.c makes mmap fail. nodes.c makes sockets in one of two network namespaces.
CTEST_LINK := -rdynamic $(addprefix -Wl$(,)--wrap=,mmap dp_dev_close dp_qp_export dp_qp_connect)
# The thread sanitizer sees one process, so only cases with several threads in it run. It does not know fences (-Wno-tsan). The
# code's fences are between shared words that are themselves atomic, so the sanitizer may miss an order but reports no false
# races. Nothing is suppressed. If the kernel randomises addresses more than the compiler's runtime supports
# (vm.mmap_rnd_bits above 28), setarch turns randomisation off.
TSAN_CASES := 'threads/*' 'reap/*' 'turns/*' '*@one-device' '*@two-devices' 'device/*' 'channel/*' 'wait/w*' 'wait/break*' 'connect/*-hello' 'connect/no-*' \
	'reset/*-refused'
test-c-tsan: test-c-tsan-shm test-c-tsan-tcp
test-c-tsan-shm: build/ctest/dp_test-tsan
	$(Q)setarch -R build/ctest/dp_test-tsan --provider shm $(TSAN_CASES)
test-c-tsan-tcp: build/ctest/dp_test-tsan
	$(Q)setarch -R build/ctest/dp_test-tsan --provider tcp 'tcp/*' '*@two-devices'

$(eval $(call c_program,build/ctest/dp_test,build/ctest/plain,$(CTEST_SOURCES),$(DP_CFLAGS) $(CFLAGS),$(CTEST_LINK)))
$(eval $(call c_program,build/ctest/dp_test-tsan,build/ctest/tsan,$(CTEST_SOURCES),$(DP_CFLAGS) $(SANITIZE_THREAD),$(CTEST_LINK)))
$(eval $(call c_program,build/ctest/dp_test-asan,build/ctest/asan,$(CTEST_SOURCES),$(DP_CFLAGS) $(SANITIZE),$(CTEST_LINK)))

# ---- fuzzing: tests/fuzz/README.md

FUZZ_NAMES := $(patsubst tests/fuzz/fuzz_%.c,%,$(sort $(wildcard tests/fuzz/fuzz_*.c)))
FUZZ_CFLAGS := $(DP_CFLAGS) -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined \
	-Itests/fuzz/stub
# The code under test, without main() and without the code that runs a worker.
FUZZED := $(DP_SOURCES) $(WORKER_PARTS) $(filter-out client/c/agent.c client/c/agent_start.c client/c/agent_prepare.c,$(wildcard client/c/*.c)) tests/fuzz/fabric.c

# $(call fuzz_build,DIRECTORY,COMPILER,FLAGS OF SOURCES,FLAGS OF THE LINK,DRIVER): DIRECTORY/NAME for each target.
define fuzz_build
$(1)/lib.a: $(patsubst %.c,$(1)/%.o,$(FUZZED))
	$$(call say,AR,$$@)
	$$(Q)rm -f $$@ && ar rcs $$@ $$(filter %.o,$$^)

$(1)/%.o: %.c $(1)/flags
	$$(call say,CC,$$<)
	$$(Q)mkdir -p $$(@D)
	$$(Q)$(2) $(FUZZ_CFLAGS) $(3) -MMD -MP -c -o $$@ $$<

$(1)/flags: FORCE
	@printf '%s\n' '$(2) $(FUZZ_CFLAGS) $(3) $(4)' | $$(call unless_same,$$@)

$(addprefix $(1)/,$(FUZZ_NAMES)): $(1)/%: $(1)/tests/fuzz/fuzz_%.o $(1)/lib.a $(5)
	$$(call say,LD,$$@)
	$$(Q)$(2) $(FUZZ_CFLAGS) $(4) -o $$@ $$^ $(DP_LIBS) -lm

-include $(patsubst %.c,$(1)/%.d,$(FUZZED) $(FUZZ_NAMES:%=tests/fuzz/fuzz_%.c))
endef

# gcc with driver.c, which must not be instrumented.
$(eval $(call fuzz_build,build/fuzz/gcc,$(CC),-fsanitize-coverage=trace-pc$(,)trace-cmp,,build/fuzz/driver.o))
build/fuzz/driver.o: tests/fuzz/driver.c tests/fuzz/fuzz.h
	$(call say,CC,$<)
	$(Q)mkdir -p $(@D)
	$(Q)$(CC) $(DP_CFLAGS) -O2 -g -c -o $@ $<
test-fuzz:
	$(Q)tests/fuzz/run --quick

FUZZTIME ?= 60s
.PHONY: test-fuzz fuzz
fuzz: ## every fuzz target for a while (FUZZTIME=60s each)
	$(Q)tests/fuzz/run --time $(FUZZTIME)

# clang and libFuzzer, for `make fuzz` if clang is installed.
$(eval $(call fuzz_build,build/fuzz/clang,clang,-fsanitize=fuzzer-no-link,-fsanitize=fuzzer,))

# Programs of tests/capi that call functions on another machine or node.
REMOTE_TESTS := $(patsubst %,build/twovm/%_test,api event failover cpp fortran) build/twovm/functions.so
REMOTE_LINK := -Llib -lrfaas -pthread '-Wl,-rpath,$$ORIGIN/../../lib'
.PHONY: remote-tests
remote-tests: $(REMOTE_TESTS)
$(REMOTE_TESTS): | headers library fortran
build/twovm/%_test: tests/capi/testdata/%_test.c $(wildcard tests/capi/testdata/*.h)
	$(call say,CC,$@)
	$(Q)mkdir -p $(@D) && $(CC) -std=gnu11 -D_GNU_SOURCE -O1 -g -Iinclude -o $@ $< $(REMOTE_LINK)
build/twovm/%_test: tests/capi/testdata/%_test.cpp
	$(call say,CXX,$@)
	$(Q)mkdir -p $(@D) && $(CXX) -std=c++17 -O1 -g -Iinclude -o $@ $< $(REMOTE_LINK)
build/twovm/%_test: tests/capi/testdata/%_test.f90
	$(call say,FC,$@)
	$(Q)mkdir -p $(@D) && $(FC) -std=f2018 -O1 -g -Jbuild/twovm -Iinclude -o $@ $< lib/librfaas_fortran.a $(REMOTE_LINK)
build/twovm/functions.so: tests/capi/testdata/functions.c
	$(call say,CC,$@)
	$(Q)mkdir -p $(@D) && $(CC) -shared -fPIC -O2 -Iinclude -o $@ $<

# Client processes of tests/faults, and the library that they call.
.PHONY: test-programs
test-programs: build/faults/caller build/faults/race build/faults/work.so

build/faults/%: tests/faults/testdata/%.c tests/faults/testdata/work.h | headers library
	$(call say,CC,$@)
	$(Q)mkdir -p $(@D)
	$(Q)$(CC) -std=gnu11 -D_GNU_SOURCE -Wall -Wextra $(CFLAGS) -Iinclude -o $@ $< -Llib -lrfaas '-Wl,-rpath,$$ORIGIN/../../lib'

build/faults/%.so: tests/faults/testdata/%.c tests/faults/testdata/work.h | headers
	$(call say,CC,$@)
	$(Q)mkdir -p $(@D)
	$(Q)$(CC) -std=gnu11 -D_GNU_SOURCE -Wall -Wextra $(CFLAGS) -fPIC -shared -Iinclude -o $@ $<

# Most of these tests wait until a fault is noticed, so many run at the same time.
test-faults: ## single kills and stops of every process; cancels and deadlines race with 400,000 replies (make bench: a million)
	$(Q)$(try_build)
	$(Q)$(GO) test -count=1 -v -vet=off -timeout $(HANG) -parallel 20 -skip 'TestRandomKills|TestChaos|TestBetweenNodes.*' ./tests/faults -calls 400000
	$(Q)$(MAKE) --no-print-directory test-standby

test-standby: programs build/cluster/holder build/functions/echo.so ## kill and stop the resource manager that serves, with a standby; end etcd
	$(Q)$(GO) test -count=1 -v -vet=off -timeout $(HANG) -skip TestRollingUpgrade ./tests/cluster

test-kills: ## 100 random kills under load (make bench: 300, make soak: 1000), and a short form of make chaos
	$(Q)$(try_build)
	$(Q)$(GO) test -count=1 -v -vet=off -timeout 590s -run 'TestRandomKills$$|TestChaos$$' ./tests/faults -kills 100

test-hostile: ## attacks by functions, clients and unauthenticated processes on a real cluster, with a table of the outcomes (as root)
	$(Q)$(try_build)
	$(Q)$(GO) test -count=1 -v -vet=off -timeout $(HANG) ./tests/hostile -cluster

.PHONY: test-slurm
test-slurm: ## executors as jobs and by hooks on a real Slurm cluster in namespaces (as root)
	$(Q)$(try_build)
	$(Q)$(GO) test -count=1 -v -vet=off -timeout $(HANG) ./tests/slurm -cluster -rounds 6

# Bounds are ratios, and results above their bound are measured again, so a regression by half is found on any machine. Status 3 means
# that the machine was too busy to measure anything: the lane reports it, tests/run prints it after all lanes, and the lane does not fail.
GUARD := bin/rfaas bench guard --pairs 9 --duration 4s --repeats 5 --total 35s
unless_busy = || { s=$$?; [ $$s -eq 3 ] && echo "calls over $(1) were NOT JUDGED: the machine is too busy" | tee -a "$${RFAAS_NOT_TESTED:-/dev/null}"; }
.PHONY: test-guard
test-guard: $(if $(BUILT),,build) ## measure calls beside their floor: fails if a ratio has grown by half
	$(Q)$(GUARD) --slack 1.5 --prove $(call unless_busy,shm)
	$(Q)RFAAS_TEST_FIGURES=1 $(GO) test -count=1 -v -vet=off -timeout $(HANG) -run TestWorkerSlowsDown ./internal/reference
	$(Q)scripts/softroce/run --timeout 130 -- $(GUARD) --slack 1.3 --provider verbs --prove $(call unless_busy,verbs)

# The package of Python, with a new interpreter for each provider, and a wheel that pip builds without a network.
.PHONY: test-python test-python-first test-python-second test-python-tcp test-python-mpi test-python-wheel
test-python: test-python-first test-python-second test-python-tcp test-python-mpi test-python-wheel ## the Python package: calls, executors, threads, processes, bad input; an MPI program; and its wheel
python_tests = PYTHONPATH=$(CURDIR)/lib/python PYTHONMALLOC=debug $(PYTHON) -m unittest discover -s client/python/tests
test-python-first: tried-build
	$(Q)RFAAS_TEST_PROVIDER=shm $(python_tests) -p 'test_[a-e]*.py'
test-python-second: tried-build
	$(Q)RFAAS_TEST_PROVIDER=shm $(python_tests) -p 'test_[!a-e]*.py'
test-python-tcp: tried-build # the other tests do not depend on the provider
	$(Q)cd client/python/tests && RFAAS_TEST_PROVIDER=tcp PYTHONPATH=$(CURDIR)/lib/python PYTHONMALLOC=debug $(PYTHON) -m unittest test_calls test_failures test_processes test_python
test-python-mpi: tried-build
	$(Q)$(if $(findstring /,$(PYTHON)),PATH=$(dir $(PYTHON)):$$PATH) PYTHONPATH=$(CURDIR)/lib/python PROGRAM=examples/mpi/points/points.py RANKS=2 CORES=2 scripts/demo --blocks 20
test-python-wheel: tried-build
	$(Q)rm -rf build/wheel && mkdir -p build/wheel && cp -r client/python build/wheel/source && cp lib/$(SONAME) build/wheel
	$(Q)cd build/wheel && RFAAS_VERSION=$(RELEASE_VERSION) RFAAS_INCLUDE=$(CURDIR)/include RFAAS_BUNDLE=$(CURDIR)/build/wheel/$(SONAME) \
		$(PYTHON) -m pip --disable-pip-version-check wheel --quiet --no-index --no-deps --no-build-isolation -w . ./source
	$(Q)cd build/wheel && $(PYTHON) -m pip install --quiet --no-index --no-deps --target installed rfaas-$(RELEASE_VERSION)-cp311-abi3-*.whl && rm $(SONAME) && \
		cd / && PYTHONPATH=$(CURDIR)/build/wheel/installed $(PYTHON) -c 'import rfaas; open(rfaas._pickles.WORKER_LIBRARY); print(rfaas.__file__, *rfaas.library_version())' | grep -F build/wheel/installed

test-install: # installs, uses the installed files, uninstalls; upgrades a running cluster
	$(Q)tests/run --install-check
	$(Q)$(MAKE) --no-print-directory test-upgrade

# The revision from which test-upgrade upgrades: the first one whose versions (docs/compatibility.md) are all equal to those of this tree. When one
# of these versions changes, choose a later revision here. Only what a node of a cluster needs is built, without its tests and examples.
EARLIER := fa4b562996ffafa04d6c0ab783c6bd841424eb6d
EARLIER_TREE := build/earlier/tree
test-upgrade: programs build/cluster/holder build/cluster/holder-earlier build/functions/echo.so ## upgrade a cluster from an earlier revision under 100 leases
	$(Q)$(GO) test -count=1 -v -vet=off -timeout $(HANG) -run TestRollingUpgrade ./tests/cluster

build/earlier/$(EARLIER):
	$(call say,EARLIER,$(EARLIER))
	@git cat-file -e $(EARLIER) 2>/dev/null || git fetch -q --depth 1 origin $(EARLIER) || { \
		echo 'test-upgrade builds revision $(EARLIER), which neither this clone nor its origin has: run git fetch --unshallow' >&2; exit 1; }
	$(Q)rm -rf $(@D) && mkdir -p $(EARLIER_TREE) && git archive $(EARLIER) | tar -x -C $(EARLIER_TREE)
	+$(Q)$(MAKE) --no-print-directory -s -C $(EARLIER_TREE) programs library PROGRAMS='executor resource-manager' VERSION=$(EARLIER)
	$(Q)touch $@

build/cluster/holder: tests/cluster/testdata/holder.c | headers library
	$(call say,CC,$@)
	$(Q)mkdir -p $(@D)
	$(Q)$(CC) -std=gnu11 -Wall -Wextra $(CFLAGS) -Iinclude -o $@ $< -Llib -lrfaas '-Wl,-rpath,$$ORIGIN/../../lib'
build/cluster/holder-earlier: tests/cluster/testdata/holder.c build/earlier/$(EARLIER)
	$(call say,CC,$@)
	$(Q)mkdir -p $(@D)
	$(Q)$(CC) -std=gnu11 -Wall -Wextra $(CFLAGS) -I$(EARLIER_TREE)/client/c -o $@ $< -L$(EARLIER_TREE)/lib -lrfaas '-Wl,-rpath,$$ORIGIN/../earlier/tree/lib'

# Builds in a copy of the tree. The packages compile the programs anew, with Debian's flags, and the lanes after this one need those of this tree.
# Without -g, which would take a fifth of the time and is stripped.
PACKAGES_TREE := build/packages/tree
test-packages: export DEB_CFLAGS_STRIP := -g
test-packages: export DEB_CXXFLAGS_STRIP := -g
test-packages: export DEB_FFLAGS_STRIP := -g
test-packages: # the Debian packages in a new root: install, demonstration, upgrade, purge; the site of the documents
	$(Q)rm -rf $(PACKAGES_TREE) && git clone -q --shared --no-checkout . $(PACKAGES_TREE)
	$(Q)tar -c --anchored --exclude=./{.git,bin,build,include,lib,libexec} . | tar -x -C $(PACKAGES_TREE) && git -C $(PACKAGES_TREE) reset -q
	$(Q)$(MAKE) --no-print-directory -C $(PACKAGES_TREE) deb
	$(Q)$(PACKAGES_TREE)/packaging/test-debs
	$(Q)$(PACKAGES_TREE)/packaging/test-others

# The demonstration of `make run` and the other examples, with each MPI.
test-demo: $(if $(BUILT),,build)
	$(Q)$(run_examples)
	$(Q)tests/run --interrupt-check
	$(Q)TWO_NODES=1 scripts/demo | grep -A 5 '(tcp, executor .* on node2)'
	$(Q)TWO_NODES=1 tests/run --interrupt-check
	$(Q)$(MAKE) --no-print-directory MPI=mpich EXAMPLES=build/examples-mpich RANK_COUNTS=4 test-demo-mpich

# Builds the examples with the other MPI in a separate directory, because lanes that run at the same time use those of build/examples.
.PHONY: test-demo-mpich
test-demo-mpich: examples
	$(Q)$(run_examples)

# On two ranks, on four with two executors, and on two whose executor is killed in the middle, with and without another executor.
RANK_COUNTS := 2 4
run_examples = for program in $(ALL_MPI_PROGRAMS); do for ranks in $(RANK_COUNTS); do \
	PROGRAM=$$program RANKS=$$ranks EXECUTORS=$$((ranks / 2)) CORES=2 scripts/demo; done; done; \
	export RANKS=2 KILL='rank 0 calls on'; for executors in 2 1; do \
	PROGRAM=$(EXAMPLES)/montecarlo EXECUTORS=$$executors scripts/demo -mourn -points 300000000; done; \
	PROGRAM=$(EXAMPLES)/conjugate EXECUTORS=2 scripts/demo 32 100 lose

test-softroce: build/ctest/dp_test ## everything that uses verbs, on a real verbs device in a virtual machine
	$(Q)$(try_build)
	$(Q)rm -rf build/gotest && mkdir -p build/gotest/programs
	$(Q)$(if $(SOFTROCE_PACKAGES),$(GO) test -c -o build/gotest/ $(SOFTROCE_PACKAGES))
	$(Q)cd tests/capi && RFAAS_REQUIRE_VERBS=1 RFAAS_TEST_PROGRAMS=$(CURDIR)/build/gotest/programs ../../build/gotest/capi.test -compile \
		-test.skip "$$(../run --not-here tests/capi)" || echo 'make: some programs of tests/capi were not compiled; going on with the tests' >&2
	$(Q)scripts/softroce/run --timeout 840 -e RFAAS_REQUIRE_VERBS=1 -- tests/run --guest

test-softroce-faults: ## kills, stops and cancels on a real verbs device in a virtual machine
	$(Q)$(try_build)
	$(Q)$(in_faults_vm) --timeout 590 -- \
		../../build/gotest-faults/faults.test -test.v -test.timeout 580s -test.parallel 4 -test.skip 'TestBetweenNodes.*' -kills 20 -calls 8000

# The nodes are namespaces of one machine with a verbs device, which all of them reach.
test-softroce-slurm: ## an MPI job on a real Slurm that is served by another node, over verbs in a virtual machine
	$(Q)$(try_build)
	$(Q)mkdir -p build/gotest-slurm && $(GO) test -c -o build/gotest-slurm/ ./tests/slurm
	$(Q)cd tests/slurm && ../../scripts/softroce/run --timeout 280 --memory 3072 -e RFAAS_REQUIRE_VERBS=1 -- \
		../../build/gotest-slurm/slurm.test -test.v -test.timeout 270s -test.run TestMPIJobOnOtherNodes -cluster

# Both machines read the same secret. Its bytes do not matter: the network ends with the machines.
TWOVM := scripts/softroce/run2 --expendable --timeout 1100 -e FAULTS_REMOTE=10.77.0.3:7000
TWOVM_SECOND := sh -c 'scripts/softroce/cable && exec build/twovm/remote serve 10.77.0.3:7000' # the command of the second machine
test-twovm: ## client in one virtual machine, executor in another: link outages, a killed machine, exact accounts
	$(Q)$(try_build)
	$(Q)$(MAKE) --no-print-directory twovm-programs
	$(Q)for boot in first second; do $(TWOVM) -- tests/run --twovm $$boot -- $(TWOVM_SECOND); done
.PHONY: twovm-programs
twovm-programs:
	$(Q)mkdir -p build/twovm && $(GO) test -c -o build/twovm/ ./tests/faults ./client ./internal/manager && $(GO_BUILD) -o build/twovm/ ./tests/remote
	$(Q)umask 077 && od -An -v -tx1 -N 32 /dev/urandom | tr -d ' \n' >build/twovm/secret && echo >>build/twovm/secret

check: build test-programs lint build/ctest/dp_test ## before a commit: lint and the quick tests
	$(Q)build/ctest/dp_test --provider shm
	$(Q)$(GO) test -short -vet=off ./...

lint: lint-go lint-c lint-sh lint-prose lint-readme lint-rules ## gofmt, go vet, staticcheck, compiler warnings, shellcheck, spelling, prose, README's table, alerting rules

STATICCHECK := build/tools/staticcheck
$(STATICCHECK): tools/go.mod tools/go.sum
	$(call say,TOOLS,$(@D))
	$(Q)mkdir -p $(@D)
	$(Q)cd tools && $(GO) build -buildvcs=false -o ../$(@D)/ tool
	$(Q)touch $@

lint-go: $(STATICCHECK)
	$(call say,LINT,go)
	$(Q)bad=$$(find . -name '*.go' -not -path './build/*' -print0 | xargs -0 -r gofmt -l -s); \
		[[ -z $$bad ]] || { printf 'gofmt -s would change:\n%s\n' "$$bad" >&2; exit 1; }
	$(Q)$(GO) vet ./...
	$(Q)$(GO) vet -tags mpich ./mpi
	$(Q)$(STATICCHECK) ./...

# Compiles with optimisation, because many warnings come only from the optimiser. Each header must compile alone.
lint-c:
	$(call say,LINT,c)
	$(Q)printf '%s\n' $(wildcard tests/fuzz/*.c) | xargs -P 2 -I FILE \
		$(CC) $(DP_CFLAGS) $(CFLAGS) -Itests/fuzz/stub -Werror -Wshadow -Wpointer-arith -Wstrict-prototypes -S -o /dev/null FILE

	$(Q)printf '%s\n' $(wildcard $(DP)/*.c $(CLIENT)/*.c $(WORKER)/*.c $(WORKER)/seed/*.c $(WORKER)/startup/*.c $(WORKER)/fortran/*.c benchmarks/raw/*.c benchmarks/raw/peer/*.c benchmarks/fromc/*.c benchmarks/tcp/*.c benchmarks/python/*.c tests/c/*.c $(filter-out %/mpi_lease_test.c,$(wildcard tests/*/testdata/*.c)) client/testdata/*.c) | xargs -P 2 -I FILE \
		$(CC) $(DP_CFLAGS) -I$(WORKER) $(CFLAGS) -Werror -Wshadow -Wpointer-arith -Wstrict-prototypes -S -o /dev/null FILE
	$(Q)printf '%s\n' $(if $(PYTHON_PLACES),$(wildcard client/python/ext/*.c client/python/worker/*.c)) | xargs -r -P 2 -I FILE \
		$(CC) $(PYTHON_CFLAGS) -I$(WORKER) -Werror -Wshadow -Wpointer-arith -Wstrict-prototypes -S -o /dev/null FILE
	$(Q)printf '%s\n' $(wildcard $(DP)/*.h $(WORKER)/*.h $(WORKER)/seed/*.h $(WORKER)/startup/*.h benchmarks/raw/*.h) | xargs -P 2 -I FILE \
		$(CC) $(DP_CFLAGS) -Werror -fsyntax-only -x c -include FILE /dev/null

# SC2317 reports code that only a trap calls as unreachable.
lint-sh:
	$(call say,LINT,sh)
	$(Q)grep -rlE '^(#!.*\bbash\b|# shellcheck shell=)' scripts packaging tests/run tests/softroce tests/fuzz/run .ci/run | xargs -r shellcheck -x -e SC2317
	$(Q)grep -rlE '^#!/bin/sh' scripts packaging | xargs -r shellcheck -x -e SC2317 -s dash

# Spelling of all text. The prose rules of tools/prose hold for documents.
PROSE := README.md CONTRIBUTING.md RATIONALE.md CHANGELOG.md $(wildcard [A-Z]*.md docs/*.md) benchmarks/README.md
lint-prose: $(STATICCHECK)
	$(call say,LINT,prose)
	$(Q)grep -rlI --exclude-dir=.git --exclude-dir=build --exclude-dir=testdata --exclude='*.sum' --exclude=apigen_test.go . | \
		xargs build/tools/misspell -error -i rela
	$(Q)build/tools/vale --config tools/prose/vale.ini --output line $(sort $(PROSE))

# README's table must agree with benchmarks/headline.
.PHONY: lint-readme
lint-readme:
	$(call say,LINT,README.md)
	$(Q)$(GO) run -buildvcs=false ./cmd/rfaas-bench report --readme README.md --check benchmarks/headline

# The alerting rules, and their tests. TestMonitoringNamesExist checks that the metrics in them and in the dashboard exist.
PROMTOOL ?= $(or $(shell command -v promtool 2>/dev/null),build/tools/promtool)
.PHONY: lint-rules
lint-rules:
	$(call say,LINT,rfaas.rules.yml)
	$(Q)if [[ -x $(PROMTOOL) ]]; then $(PROMTOOL) check rules packaging/monitoring/rfaas.rules.yml && $(PROMTOOL) test rules packaging/monitoring/rfaas.rules.test.yml; \
		else echo 'promtool is missing: run make deps' >&2; [[ -z "$${CI:-}" ]]; fi

# ---------------------------------------------------------------------------------------------- installing

BINDIR := $(DESTDIR)$(PREFIX)/bin
LIBDIR := $(DESTDIR)$(PREFIX)/$(LIB)
# Fortran sources, and sources that a program compiles with its own MPI.
FORTRAN_INSTALLED := $(notdir $(FORTRAN_SOURCES) $(wildcard $(WORKER)/fortran/*)) rfaas_mpi.f90 rfaas_mpi_fortran.c
INSTALLED := $(addprefix bin/,$(PROGRAMS) rfaas-cc) libexec/rfaas-worker libexec/rfaas-spawner libexec/rfaas-agent libexec/rfaas-bench-peer $(DEMO_FILES) \
	$(HEADERS:%=include/%) $(FORTRAN_MODULES:%=include/%.mod) $(FORTRAN_INSTALLED:%=share/rfaas/%) \
	$(addprefix $(LIB)/,$(SONAME) librfaas.so librfaas_fortran.a pkgconfig/rfaas.pc pkgconfig/rfaas-fortran.pc cmake/rfaas/rfaas-config.cmake cmake/rfaas/rfaas-config-version.cmake) \
	share/modulefiles/rfaas/$(VERSION)
# Where Python looks for packages if PREFIX is /usr/local. The module file has it for other prefixes.
PYTHONDIR ?= $(PREFIX)/lib/$(or $(word 2,$(PYTHON_PLACES)),python3/site-packages)
# The version of the API, such as 0.4, and that of this release or of the next one, such as 0.4.0, for pkg-config, CMake and pip.
API_VERSION := $(shell sed -n 's/^.define RFAAS_VERSION_M[A-Z]*OR //p' $(CLIENT)/rfaas.h | paste -sd.)
RELEASE_VERSION = $(firstword $(subst ~, ,$(PACKAGE_VERSION)))
SLURM_FILES := $(addprefix scripts/slurm/,executor.sbatch prolog epilog rfaas-slurm-node.service)
UNITS := $(patsubst scripts/systemd/%,%,$(wildcard scripts/systemd/*.service scripts/systemd/user/*.service))
# Below share/doc/rfaas, documents have the directory structure of the source tree, so that their links work.
DOCS := README.md RATIONALE.md CHANGELOG.md CONTRIBUTING.md SECURITY.md CODE_OF_CONDUCT.md CITATION.cff LICENSE $(wildcard docs/*.md) benchmarks/README.md benchmarks/scale/README.md benchmarks/headline/latency-shm.png

include packaging/packaging.mk

.PHONY: install uninstall clean distclean proto
install: build ## into PREFIX, below DESTDIR
	$(Q)[[ -n '$(PYTHON_EXTENSION)' ]] || echo 'install: without the Python package, because $(PYTHON) is missing, is older than 3.11 or has no header files (Debian: python3-dev)' >&2
	$(Q)[[ -n '$(FORTRAN)' ]] || echo 'install: without the Fortran modules, because the compiler $(FC) is missing (Debian: gfortran)' >&2
	$(call say,INSTALL,$(DESTDIR)$(PREFIX))
	$(Q)install -d $(BINDIR) $(LIBDIR)/pkgconfig $(DESTDIR)$(PREFIX)/{libexec/rfaas-demo,include,share/doc/rfaas,share/rfaas/slurm/examples}
	$(Q)install -m 755 $(addprefix bin/,$(PROGRAMS) rfaas-cc) $(BINDIR)
	$(Q)install -m 755 libexec/rfaas-worker libexec/rfaas-spawner libexec/rfaas-agent libexec/rfaas-bench-peer $(DESTDIR)$(PREFIX)/libexec
	$(Q)install -m 755 libexec/rfaas-demo/blackscholes $(DESTDIR)$(PREFIX)/libexec/rfaas-demo
	$(Q)install -m 644 libexec/rfaas-demo/{blackscholes.so,options.txt} $(DESTDIR)$(PREFIX)/libexec/rfaas-demo
	$(Q)install -m 755 lib/$(SONAME) $(LIBDIR)
	$(Q)ln -sfn $(SONAME) $(LIBDIR)/librfaas.so
	$(Q)install -m 644 $(HEADERS:%=include/%) $(DESTDIR)$(PREFIX)/include
	$(Q)for f in $(DOCS); do install -D -m 644 $$f $(DESTDIR)$(PREFIX)/share/doc/rfaas/$$f; done
	$(Q)install -m 644 $(FORTRAN_SOURCES) $(wildcard $(WORKER)/fortran/*) client/mpi/rfaas_mpi.f90 client/mpi/rfaas_mpi_fortran.c $(DESTDIR)$(PREFIX)/share/rfaas
	$(Q)umask 022; [[ -z '$(FORTRAN)' ]] || { \
		install -m 644 lib/librfaas_fortran.a $(LIBDIR) && install -m 644 $(FORTRAN_MODULES:%=include/%.mod) $(DESTDIR)$(PREFIX)/include && \
		printf '%s\n' 'prefix=$(PREFIX)' 'libdir=$${prefix}/$(LIB)' 'includedir=$${prefix}/include' '' 'Name: rfaas-fortran' \
			'Description: functions executed by remote memory write: Fortran module' 'Version: $(RELEASE_VERSION)' 'Requires: rfaas' \
			'Cflags: -I$${includedir}' 'Libs: -L$${libdir} -lrfaas_fortran' >$(LIBDIR)/pkgconfig/rfaas-fortran.pc; }
	$(Q)[[ -z '$(PYTHON_EXTENSION)' ]] || { install -d $(DESTDIR)$(PYTHONDIR)/rfaas && \
		install -m 644 $(PYTHON_FILES) $(PYTHON_EXTENSION) $(DESTDIR)$(PYTHONDIR)/rfaas; }
	$(Q)install -d $(DESTDIR)$(PREFIX)/share/man/man{1,3,8} $(DESTDIR)$(PREFIX)/share/modulefiles/rfaas $(LIBDIR)/cmake/rfaas
	$(Q)install -m 644 $(GENERATED)/man3/*.3 $(DESTDIR)$(PREFIX)/share/man/man3
	$(Q)for s in 1 8; do install -m 644 build/man/*.$$s $(DESTDIR)$(PREFIX)/share/man/man$$s; done
	$(Q)install -d $(DESTDIR)$(PREFIX)/share/rfaas/systemd/user $(DESTDIR)$(PREFIX)/share/rfaas/monitoring
	$(Q)install -m 644 $(wildcard packaging/monitoring/*) $(DESTDIR)$(PREFIX)/share/rfaas/monitoring
	$(Q)umask 022; for f in $(UNITS); do sed -e 's|@PREFIX@|$(PREFIX)|g' scripts/systemd/$$f >$(DESTDIR)$(PREFIX)/share/rfaas/systemd/$$f; done
	$(Q)umask 022; sed -e 's|@PREFIX@|$(PREFIX)|g' -e 's|@VERSION@|$(VERSION)|g' -e 's|@PYTHONDIR@|$(PYTHONDIR)|' -e 's|@LIB@|$(LIB)|g' scripts/install/modulefile.in \
		>$(DESTDIR)$(PREFIX)/share/modulefiles/rfaas/$(VERSION)
	$(Q)umask 022; for f in rfaas-config rfaas-config-version; do \
		sed -e 's|@VERSION@|$(RELEASE_VERSION)|g' -e 's|@PREFIX_FROM_LIB@|$(shell echo $(LIB) | sed 's|[^/][^/]*|..|g')|' scripts/install/$$f.cmake.in >$(LIBDIR)/cmake/rfaas/$$f.cmake; done
	$(Q)install -m 755 $(SLURM_FILES) $(DESTDIR)$(PREFIX)/share/rfaas/slurm
	$(Q)cd $(DESTDIR)$(PREFIX)/share/rfaas/slurm && sed -i 's|/usr/local/|$(PREFIX)/|g' prolog epilog *.service && chmod 644 *.service
	$(Q)install -m 644 $(wildcard scripts/slurm/examples/*.sbatch) $(DESTDIR)$(PREFIX)/share/rfaas/slurm/examples
	$(Q)umask 022; printf '%s\n' 'prefix=$(PREFIX)' 'libdir=$${prefix}/$(LIB)' 'includedir=$${prefix}/include' '' 'Name: rfaas' \
		'Description: functions executed by remote memory write' 'Version: $(RELEASE_VERSION)' \
		'Cflags: -I$${includedir}' 'Libs: -L$${libdir} -lrfaas' >$(LIBDIR)/pkgconfig/rfaas.pc

uninstall: ## remove the installed files
	$(Q)rm -f $(INSTALLED:%=$(DESTDIR)$(PREFIX)/%)
	$(Q)rm -f $(DESTDIR)$(PREFIX)/share/man/man1/rfaas{,-*}.1 $(DESTDIR)$(PREFIX)/share/man/man3/rfaas{,_*}.3 $(DESTDIR)$(PREFIX)/share/man/man8/{executor,resource-manager,rfaas-agent}.8
	$(Q)rm -rf $(DESTDIR)$(PREFIX)/share/doc/rfaas $(DESTDIR)$(PREFIX)/share/rfaas/{slurm,systemd,monitoring} $(DESTDIR)$(PYTHONDIR)/rfaas
	$(Q)for d in share/rfaas share/modulefiles/rfaas $(LIB)/cmake/rfaas libexec/rfaas-demo; do \
		[[ ! -d $(DESTDIR)$(PREFIX)/$$d ]] || rmdir --ignore-fail-on-non-empty $(DESTDIR)$(PREFIX)/$$d; done

clean: ## remove built files, except the virtual machine's image (make distclean)
	$(Q)rm -rf bin lib libexec include
	$(Q)[[ ! -d build ]] || find build -mindepth 1 -maxdepth 1 -not -name softroce -exec rm -rf {} +

distclean: clean ## remove built files and the virtual machine's image
	$(Q)rm -rf build

proto: $(STATICCHECK) ## generate the Go code of the protobuf messages again (needs protoc)
	@command -v protoc >/dev/null || { echo 'protoc is missing (Debian: protobuf-compiler)' >&2; exit 1; }
	$(Q)protoc --plugin=build/tools/protoc-gen-go --plugin=build/tools/protoc-gen-go-grpc -I. \
		--go_out=. --go_opt=paths=source_relative --go-grpc_out=. --go-grpc_opt=paths=source_relative \
		internal/control/control.proto internal/handover/state.proto
