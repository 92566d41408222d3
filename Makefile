# qlane: `make` builds the command and the libraries, `make demo` shows it, `make test` runs the tests; `make help` lists
# the rest. No configure step: what is found is used, and the first line printed says what that was.

MAKEFLAGS += --no-builtin-rules --no-print-directory
SHELL := /bin/bash
.DELETE_ON_ERROR:
.SECONDARY:
.DEFAULT_GOAL := all

VERSION := 0.1.0
COMMIT := $(shell git rev-parse --short=10 HEAD 2>/dev/null || echo unknown)

# ---- switches: make NAME=VALUE ------------------------------------------------------------------------------------
PREFIX ?= /usr/local
DESTDIR ?=
CC := gcc
CXX := g++
AR := ar
B ?= build#       where everything is built
V ?= 0#           1 prints whole commands
WERROR ?= 0#      1 makes warnings fatal; CI does
DEBUG ?= 0#       1 builds without optimisation
SAN ?=#           address, undefined, thread, memory or fuzz; set by the targets of those names
JOBS ?= 2#        test programs at a time
FUZZ_S ?= 600#    seconds of each fuzz target
CUDA ?= auto#     no builds host only; yes compiles the CUDA files even if the engine does not use them
BENCH_TEXT ?=#    a tokenizer.json and a text file for make bench, in place of the bundled ones
ONLY ?=#          parts of names of what make kbench times
ARCH ?=#          GPU architectures, such as "90a"; all for a release
B := $(strip $(B))

WARN := -Wall -Wextra -Wshadow -Wundef -Wvla -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith -Wwrite-strings
ifeq ($(strip $(WERROR)),1)
WARN += -Werror
endif
# Contraction off: the host twins promise their bits, and a fused multiply-add would change them.
OPT := $(if $(filter 1,$(DEBUG)),-O0,-O2) -ffp-contract=off
CFLAGS ?= -g
LDFLAGS ?=
ALL_CFLAGS = -std=c17 -D_GNU_SOURCE -I. $(OPT) -fPIC -fvisibility=hidden -pthread $(WARN) $(CFLAGS) $(DEFS)
DEFS :=

SANFLAGS_address := -fsanitize=address -fno-omit-frame-pointer
SANFLAGS_undefined := -fsanitize=undefined -fno-sanitize-recover=all
SANFLAGS_thread := -fsanitize=thread
SANFLAGS_memory := -fsanitize=memory -fsanitize-memory-track-origins -fno-omit-frame-pointer
SANFLAGS_fuzz := -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
SAN := $(strip $(SAN))
ifneq ($(SAN),)
CFLAGS += $(SANFLAGS_$(SAN))
LDFLAGS += $(SANFLAGS_$(SAN))
endif
ifeq ($(SAN),fuzz)
$(B)/obj/kernels/%.o: CFLAGS := -g# no target reaches a kernel, and instrumenting them takes minutes
endif

# ---- libraries: the archive where the system has one, so that the command runs when copied to another machine --------
archive = $(shell f=$$($(CC) -print-file-name=lib$(1).a 2>/dev/null); [[ $$f = /* ]] && echo $$f || echo -l$(1))
THIRD := jansson pcre2-8 utf8proc z
LIBS := $(foreach l,$(THIRD),$(call archive,$(l))) -lm -pthread -ldl
SO_LIBS := $(THIRD:%=-l%) -lm -pthread -ldl# distributions build archives without -fPIC

# ---- CUDA: compiled in when there are kernels, nvcc and NCCL's header; NCCL itself is opened at run time ---------------
CUDA_HOME ?= $(patsubst %/bin/nvcc,%,$(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null))
NCCL_HOME ?= $(patsubst %/include/nccl.h,%,$(firstword $(wildcard /usr/include/nccl.h /usr/local/include/nccl.h \
               $(CUDA_HOME)/include/nccl.h)))
CU_SRC := $(sort $(wildcard kernels/*.cu kernels/cuda/*.cu runtime/lane/*.cu))
CUDA_C := $(sort $(wildcard kernels/cuda/*.c runtime/lane/*_nccl.c runtime/lane/*_cuda.c))
NVCC := $(wildcard $(CUDA_HOME)/bin/nvcc)
HAVE_CUDA :=
ifeq ($(strip $(CUDA)),no)
FOUND := host only (CUDA=no)
else ifeq ($(CU_SRC),)
FOUND := host only (this version has no CUDA kernels)
else ifeq ($(filter yes,$(CUDA))$(shell grep -lsw QL_CUDA runtime/engine/*.c),)
FOUND := host only (this version has no CUDA lanes yet)
else ifeq ($(NVCC),)
FOUND := host only (no nvcc)
else ifeq ($(NCCL_HOME),)
FOUND := host only (no nccl.h)
else
HAVE_CUDA := 1
# This machine's GPU, else the two most used kinds; "a" where the architecture has features of its own.
ifeq ($(strip $(ARCH)),)
ARCH := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -d . | sort -u | \
          sed -E 's/^(9|1[0-9])0$$/\10a/' | tr '\n' ' ')
ARCH := $(if $(strip $(ARCH)),$(ARCH),75 90a)
else ifeq ($(strip $(ARCH)),all)
ARCH := 75 80 86 89 90a 100a 120a
endif
CUDA_VERSION := $(shell $(NVCC) --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
NCCL_VERSION := $(shell awk '/define NCCL_(MAJOR|MINOR|PATCH) /{v = v (v == "" ? "" : ".") $$3} END {print v}' \
                  $(NCCL_HOME)/include/nccl.h)
FOUND := CUDA $(CUDA_VERSION) for $(strip $(ARCH)), NCCL $(NCCL_VERSION)
GENCODE := $(foreach a,$(ARCH),-gencode arch=compute_$(a),code=sm_$(a))
# A single architecture without features of its own: its intermediate code too, which the driver of a newer GPU compiles.
ifeq ($(words $(ARCH)):$(filter %a,$(ARCH)),1:)
GENCODE += -gencode arch=compute_$(strip $(ARCH)),code=compute_$(strip $(ARCH))
endif
# nvcc gives kernels and their launch stubs global names whatever their linkage; only ours stay global.
KEEP_GLOBAL := ql_* _Z[0-9]ql_* _Z[0-9][0-9]ql_*
NVFLAGS := -std=c++17 -O3 -lineinfo -I. -DQL_CUDA=1 $(GENCODE) -Xcompiler -fPIC,-fvisibility=hidden,-fno-exceptions
# The runtime library unwinds and its launch stubs guard their statics: both from archives, so that nothing else is needed.
CUDA_LIBS := $(CUDA_HOME)/lib64/libcudart_static.a $(call archive,supc++) -lrt
PC_CUDA_LIBS := -L$(CUDA_HOME)/lib64 -lcudart_static -lsupc++ -lrt
LIBS += $(CUDA_LIBS) -static-libgcc
SO_LIBS += $(CUDA_LIBS) -static-libgcc
$(B)/obj/kernels/cuda/%.o $(B)/obj/runtime/lane/%.o $(B)/obj/tests/%.o: DEFS += -isystem $(CUDA_HOME)/include -isystem $(NCCL_HOME)/include
endif

DEFS += -DQL_CUDA=$(if $(HAVE_CUDA),1,0)

# ---- sources ---------------------------------------------------------------------------------------------------------
LIB_SRC := $(sort $(filter-out $(CUDA_C),$(wildcard runtime/base/*.c runtime/text/*.c runtime/lane/*.c \
             runtime/model/*.c runtime/engine/*.c runtime/check/*.c loader/*.c kernels/*.c kernels/host/*.c)) $(if $(HAVE_CUDA),$(CUDA_C)))
LIB_OBJ := $(LIB_SRC:%.c=$(B)/obj/%.o) $(if $(HAVE_CUDA),$(CU_SRC:%.cu=$(B)/obj/%.cu.o))
CLI_OBJ := $(patsubst %.c,$(B)/obj/%.o,$(sort $(wildcard runtime/cli/*.c)))

$(B)/obj/kernels/host/%_avx2.o: DEFS += -mavx2 -mf16c
$(B)/obj/kernels/host/%_avx512.o: DEFS += -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mf16c
$(B)/obj/runtime/engine/version.o: DEFS += -DQL_VERSION='"$(VERSION)"' -DQL_COMMIT='"$(COMMIT)"' \
  $(if $(HAVE_CUDA),-DQL_CUDA_VERSION='"$(CUDA_VERSION)"' -DQL_NCCL_VERSION='"$(NCCL_VERSION)"')
$(B)/obj/runtime/cli/io.o: DEFS += -DQL_PREFIX='"$(PREFIX)"'

ifeq ($(strip $(V)),0)
Q := @
say = @printf '  %-5s %s\n' $(1) $(2)
endif

.PHONY: all
all: found $(B)/qlane $(B)/libqlane.a $(B)/libqlane.so ## the command and the libraries (default)

.PHONY: found
found:
	@echo "qlane $(VERSION) ($(COMMIT)): $(FOUND)"

# What objects were told beyond their source: they are compiled again when it changes.
$(B)/config: always
	@mkdir -p $(@D)
	@new='$(VERSION) $(COMMIT) $(PREFIX) $(FOUND) $(CC) $(OPT) $(WARN) $(CFLAGS)'; \
	  [[ -f $@ && "$$new" = "$$(< $@)" ]] || printf '%s\n' "$$new" > $@
$(B)/flags: always
	@mkdir -p $(@D)
	@new='$(FOUND) $(CC) $(OPT) $(WARN) $(CFLAGS)'; [[ -f $@ && "$$new" = "$$(< $@)" ]] || printf '%s\n' "$$new" > $@
.PHONY: always
always:
$(B)/obj/runtime/engine/version.o $(B)/obj/runtime/cli/io.o: $(B)/config

$(B)/obj/%.o: %.c $(B)/flags
	@mkdir -p $(@D)
	$(call say,CC,$<)
	$(Q)$(CC) $(ALL_CFLAGS) -MMD -MP -c $< -o $@

$(B)/obj/%.cu.o: %.cu $(B)/flags
	@mkdir -p $(@D)
	$(call say,NVCC,$<)
	$(Q)$(NVCC) $(NVFLAGS) -MMD -MP -c $< -o $@
	$(Q)objcopy --wildcard $(KEEP_GLOBAL:%=--keep-global-symbol='%') $@

$(B)/libqlane.a: $(LIB_OBJ)
	$(call say,AR,$@)
	$(Q)rm -f $@ && $(AR) rcs $@ $^

$(B)/libqlane.so: $(LIB_OBJ)
	$(call say,LD,$@)
	$(Q)$(CC) -shared -Wl,-soname,libqlane.so.0 -Wl,-z,defs -Wl,--exclude-libs,ALL $(LDFLAGS) $^ $(SO_LIBS) -o $@

$(B)/qlane: $(CLI_OBJ) $(B)/libqlane.a
	$(call say,LD,$@)
	$(Q)$(CC) $(LDFLAGS) $^ $(LIBS) -o $@

# ---- programs of tests, bench and examples: one source file each, helpers from an archive -------------------------------
MODEL_HELP := $(patsubst %,tests/model/%.c,common bits plant sense)
UNIT_HELP := $(patsubst %,tests/unit/%.c,ckpt token)
HELPER_SRC := $(sort $(filter-out tests/kcheck.c,$(wildcard tests/*.c tests/cases/*.c)) $(MODEL_HELP) $(UNIT_HELP))
$(B)/libhelp.a: $(HELPER_SRC:%.c=$(B)/obj/%.o)
	$(call say,AR,$@)
	$(Q)rm -f $@ && $(AR) rcs $@ $^

UNIT := $(patsubst tests/unit/%.c,$(B)/unit/%,$(sort $(filter-out $(UNIT_HELP),$(wildcard tests/unit/*.c))))
MODEL := $(patsubst tests/model/%.c,$(B)/model/%,$(sort $(filter-out $(MODEL_HELP),$(wildcard tests/model/*.c))))
REPLAY := $(patsubst tests/fuzz/%.c,$(B)/replay/%,$(sort $(filter-out tests/fuzz/replay.c,$(wildcard tests/fuzz/*.c))))
FUZZ := $(REPLAY:$(B)/replay/%=$(B)/fuzz/%)
BENCH := $(patsubst bench/%.c,$(B)/%,$(sort $(wildcard bench/*.c)))
EXAMPLES := $(patsubst examples/%.c,$(B)/examples/%,$(sort $(wildcard examples/*.c)))
KCHECK := $(patsubst tests/%.c,$(B)/%,$(wildcard tests/kcheck.c))
GPU := $(if $(HAVE_CUDA),$(B)/gpu/gate $(B)/gpu/collectives $(B)/gpu/attend $(B)/gpu/chain $(B)/gpu/fused $(B)/gpu/lanes)

comma := ,
define link
@mkdir -p $(@D)
$(call say,LD,$@)
$(Q)$(CC) $(LDFLAGS) $(filter %.o,$^) $(filter %.a,$^) $(1) -o $@
endef

$(UNIT): $(B)/unit/%: $(B)/obj/tests/unit/%.o $(B)/libhelp.a $(B)/libqlane.a
	$(call link,$(LIBS) -lcmocka)
$(MODEL): $(B)/model/%: $(B)/obj/tests/model/%.o $(B)/libhelp.a $(B)/libqlane.a
	$(call link,$(LIBS) -lcmocka)
$(KCHECK): $(B)/%: $(B)/obj/tests/%.o $(B)/libhelp.a $(B)/libqlane.a
	$(call link,$(if $(filter memory,$(SAN)),-lz -lm -pthread,$(LIBS)))
$(B)/gpu/gate: $(B)/obj/tests/gpu/gate_life.o
$(B)/gpu/attend $(B)/gpu/chain $(B)/gpu/fused $(B)/gpu/lanes $(B)/gpu/kbench: $(B)/obj/tests/gpu/rig.o
$(B)/gpu/kbench: $(B)/obj/tests/gpu/kbench.o $(B)/libqlane.a
	$(call link,$(LIBS))
$(GPU): $(B)/gpu/%: $(B)/obj/tests/gpu/%.o $(B)/libhelp.a $(B)/libqlane.a
	$(call link,$(LIBS) -lcmocka -s -Wl$(comma)-rpath$(comma)'$$ORIGIN')
$(REPLAY): $(B)/replay/%: $(B)/obj/tests/fuzz/%.o $(B)/obj/tests/fuzz/replay.o $(B)/libhelp.a $(B)/libqlane.a
	$(call link,$(LIBS))
$(FUZZ): $(B)/fuzz/%: $(B)/obj/tests/fuzz/%.o $(B)/libhelp.a $(B)/libqlane.a
	$(call link,-fsanitize=fuzzer $(LIBS))
$(BENCH): $(B)/%: $(B)/obj/bench/%.o $(B)/libhelp.a $(B)/libqlane.a
	$(call link,$(LIBS))
$(EXAMPLES): $(B)/examples/%: $(B)/obj/examples/%.o $(B)/libqlane.a
	$(call link,$(LIBS))

# ---- set-up and demo ------------------------------------------------------------------------------------------------------
.PHONY: deps
deps: ## install the distribution packages that are missing, or print the line that does
	@CC="$(CC)" CXX="$(CXX)" tools/deps.sh

# A second make, because the lines above looked for libraries before they were installed.
.PHONY: demo
demo: deps ## two lanes continue "The capital of France is"
	@$(MAKE) all
	@$(B)/qlane run --lanes 2 --temp 0 -n 9 -p "The capital of France is"

# ---- tests ------------------------------------------------------------------------------------------------------------------
.PHONY: test test-run
test: deps ## everything below, and one line of counts at the end
	@$(MAKE) test-run

CHECKS := tools/layers.sh tools/waits.py 'CC=$(CC) CXX=$(CXX) tools/headers.sh' 'tools/symbols.sh $(B)' tools/format-check.sh
REPLAYS := $(foreach r,$(REPLAY),'$(r) tests/fuzz/corpus/$(notdir $(r))')
CLI_TESTS := $(foreach t,$(sort $(wildcard tests/cli/*.sh)),'$(t) $(B)/qlane')

test-run: all $(UNIT) $(MODEL) $(KCHECK) $(REPLAY) $(BENCH) $(EXAMPLES)
	@tools/runtests.sh -j $(JOBS) -d $(B)/test-logs $(KCHECK) $(MODEL) $(UNIT) $(CLI_TESTS) $(EXAMPLES) $(REPLAYS) $(CHECKS)

.PHONY: unit kcheck model cli
unit: $(UNIT) ## unit tests
	@tools/runtests.sh -j $(JOBS) -d $(B)/test-logs $^
kcheck: $(KCHECK) ## kernels against their oracles and twins
	@tools/runtests.sh -j $(JOBS) -d $(B)/test-logs $^
model: $(MODEL) ## goldens, equal bits, faults on whole models
	@tools/runtests.sh -j $(JOBS) -d $(B)/test-logs $^
cli: all ## tests of the command
	@tools/runtests.sh -j $(JOBS) -d $(B)/test-logs $(CLI_TESTS)

# One archive to copy to a machine with GPUs and nothing else; cmocka is only there as a shared library.
$(B)/gpu.tar.gz: $(GPU) $(KCHECK) $(B)/qlane $(B)/synth
	$(call say,TAR,$@)
	$(Q)cp -L $$($(CC) -print-file-name=libcmocka.so.0) $(B)/gpu/
	$(Q)tar -czf $@ -C $(B) $(GPU:$(B)/%=%) gpu/libcmocka.so.0 $(KCHECK:$(B)/%=%) qlane synth
.PHONY: gpu gpu-test
gpu: found $(if $(HAVE_CUDA),$(B)/gpu.tar.gz) ## test programs for GPUs, and one archive of them
gpu-test: gpu ## tests on this machine's GPUs
	@tools/gpu-test.sh $(B)

# Sanitizer builds have their own folders and run what is compiled code of ours.
SAN_TESTS = $(MODEL) $(UNIT) $(KCHECK) $(EXAMPLES)
.PHONY: san-run asan ubsan tsan msan msan-run
san-run: $(SAN_TESTS) $(REPLAY)
	@TIMEOUT=3600 tools/runtests.sh -j $(JOBS) -d $(B)/test-logs $(SAN_TESTS) $(REPLAYS)
asan: ## test programs under AddressSanitizer and LeakSanitizer
	@$(MAKE) san-run B=build-asan SAN=address CUDA=no
ubsan: ## test programs under UndefinedBehaviorSanitizer
	@$(MAKE) san-run B=build-ubsan SAN=undefined CUDA=no
tsan: ## test programs under ThreadSanitizer
	@$(MAKE) san-run B=build-tsan SAN=thread CUDA=no
msan: ## kernel cases under MemorySanitizer: of foreign libraries they use only CRC-32
	@$(MAKE) msan-run B=build-msan SAN=memory CUDA=no CC=clang
msan-run: $(KCHECK)
	@TIMEOUT=3600 tools/runtests.sh -d $(B)/test-logs $(KCHECK)

.PHONY: fuzz fuzz-run
fuzz: ## every fuzz target for FUZZ_S seconds, with clang
	@$(MAKE) fuzz-run B=build-fuzz SAN=fuzz CUDA=no CC=clang
fuzz-run: $(FUZZ)
	@tools/fuzz.sh $(FUZZ_S) $(JOBS) $(B) $(FUZZ)

.PHONY: kbench
kbench: $(if $(HAVE_CUDA),$(B)/gpu/kbench,$(B)/kbench) ## kernels at the 27B's shapes; ONLY="q8 n17408" names parts of names
	@$< $(ONLY)

.PHONY: bench
bench: all $(BENCH) ## speeds of kernels and of whole runs on this machine
	@tools/bench.sh $(B) $(BENCH_TEXT)

# ---- checks of the source -----------------------------------------------------------------------------------------------------
C_FILES = $(shell git ls-files -c -o --exclude-standard '*.c' '*.h' '*.cu' '*.cuh')
.PHONY: layers waits symbols headers format format-check tidy
layers: ## include direction between folders
	@tools/layers.sh
waits: ## kernels that begin early wait for the one before them
	@tools/waits.py
symbols: $(B)/libqlane.a $(B)/libqlane.so ## only ql_ names are global; the shared library exports the public ones
	@tools/symbols.sh $(B)
headers: ## each header compiles alone as C17 and as C++17
	@CC=$(CC) CXX=$(CXX) tools/headers.sh
format-check: ## source is as clang-format 14 leaves it
	@tools/format-check.sh
format: ## run clang-format on all source
	clang-format -i $(C_FILES)
tidy: ## clang-tidy with the list of .clang-tidy
	@printf '%s\n' $(filter %.c,$(C_FILES)) | xargs -P $(JOBS) -n 4 clang-tidy --quiet -- -std=c17 -D_GNU_SOURCE -I. \
	  -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mf16c -DQL_VERSION='""' -DQL_COMMIT='""' -DQL_PREFIX='""'

# ---- install --------------------------------------------------------------------------------------------------------------------
I := $(DESTDIR)$(PREFIX)
MODEL_FILES := config.json generation_config.json tokenizer.json model.safetensors README.md
.PHONY: install install-only uninstall
install: all ## into DESTDIR and PREFIX
	@$(MAKE) install-only
install-only:
	install -d $(I)/bin $(I)/lib/pkgconfig $(I)/include $(I)/share/man/man1 $(I)/share/qlane/models/tiny
	install -m 755 $(B)/qlane $(I)/bin/qlane
	install -m 644 $(B)/libqlane.a $(I)/lib/libqlane.a
	install -m 755 $(B)/libqlane.so $(I)/lib/libqlane.so.$(VERSION)
	ln -sf libqlane.so.$(VERSION) $(I)/lib/libqlane.so.0
	ln -sf libqlane.so.0 $(I)/lib/libqlane.so
	install -m 644 runtime/qlane.h $(I)/include/qlane.h
	sed 's|@PREFIX@|$(PREFIX)|; s|@VERSION@|$(VERSION)|; s|@CUDA_LIBS@|$(if $(HAVE_CUDA),$(PC_CUDA_LIBS) )|' qlane.pc.in > $(I)/lib/pkgconfig/qlane.pc
	install -m 644 docs/qlane.1 $(I)/share/man/man1/qlane.1
	install -m 644 $(MODEL_FILES:%=models/tiny/%) $(I)/share/qlane/models/tiny
uninstall: ## what install put there
	rm -f $(I)/bin/qlane $(I)/lib/libqlane.a $(I)/lib/libqlane.so $(I)/lib/libqlane.so.0 $(I)/lib/libqlane.so.$(VERSION)
	rm -f $(I)/include/qlane.h $(I)/lib/pkgconfig/qlane.pc $(I)/share/man/man1/qlane.1
	rm -f $(MODEL_FILES:%=$(I)/share/qlane/models/tiny/%)
	-rmdir $(I)/share/qlane/models/tiny $(I)/share/qlane/models $(I)/share/qlane

.PHONY: clean help
clean: ## remove everything built
	rm -rf build build-*
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  %-14s %s\n", $$1, $$2}' Makefile
	@echo; echo "Switches:"; sed -nE 's/^([A-Z_0-9]+) \?= *([^ #]*)# +(.*)/  \1=\2\t\3/p' Makefile | expand -t 26

-include $(shell find $(B)/obj -name '*.d' 2>/dev/null)
