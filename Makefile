# qlane: `make` builds the command and the libraries, `make test` runs the tests; `make help` lists the rest.
# No configure step: what is found is used, and the first lines printed say what that was.

MAKEFLAGS += --no-builtin-rules
SHELL := /bin/bash
.DELETE_ON_ERROR:

VERSION := 0.1.0
COMMIT := $(shell git rev-parse --short=10 HEAD 2>/dev/null || echo unknown)
PREFIX ?= /usr/local
CC := gcc
AR := ar
B ?= build
V ?= 0

# ---- switches ---------------------------------------------------------------------------------------------------
# SAN=address|undefined|thread|memory builds into a folder of its own; WERROR=1 makes warnings fatal (CI does).
SAN ?=
WERROR ?= 0
DEBUG ?= 0

WARN := -Wall -Wextra -Wshadow -Wundef -Wvla -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith -Wwrite-strings
ifeq ($(WERROR),1)
WARN += -Werror
endif
# Contraction off: the host twins promise their bits, and a fused multiply-add would change them.
OPT := -O2 -ffp-contract=off
ifeq ($(DEBUG),1)
OPT := -O0 -ffp-contract=off
endif
CFLAGS ?= -g
ALL_CFLAGS := -std=c17 -D_GNU_SOURCE -I. $(OPT) -fPIC -fvisibility=hidden -pthread $(WARN) $(CFLAGS)
LDFLAGS ?=

SANFLAGS_address := -fsanitize=address -fno-omit-frame-pointer
SANFLAGS_undefined := -fsanitize=undefined -fno-sanitize-recover=all
SANFLAGS_thread := -fsanitize=thread
SANFLAGS_memory := -fsanitize=memory -fsanitize-memory-track-origins -fno-omit-frame-pointer
ifneq ($(SAN),)
ALL_CFLAGS += $(SANFLAGS_$(SAN)) -O1
LDFLAGS += $(SANFLAGS_$(SAN))
endif

# ---- libraries: the archive where the system has one, so that the binary runs elsewhere ---------------------------
archive = $(shell f=$$($(CC) -print-file-name=lib$(1).a); [ "$$f" != lib$(1).a ] && echo $$f || echo -l$(1))
LIBS := $(call archive,jansson) $(call archive,pcre2-8) $(call archive,utf8proc) $(call archive,z) -lm -pthread

# ---- sources ------------------------------------------------------------------------------------------------------
LIB_SRC := $(sort $(wildcard runtime/base/*.c runtime/text/*.c runtime/lane/*.c runtime/model/*.c runtime/engine/*.c \
             loader/*.c kernels/*.c kernels/host/*.c))
CLI_SRC := $(sort $(wildcard runtime/cli/*.c))
LIB_OBJ := $(LIB_SRC:%.c=$(B)/obj/%.o)
CLI_OBJ := $(CLI_SRC:%.c=$(B)/obj/%.o)

$(B)/obj/kernels/host/%_avx2.o: ALL_CFLAGS += -mavx2 -mf16c
$(B)/obj/kernels/host/%_avx512.o: ALL_CFLAGS += -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mf16c
$(B)/obj/runtime/engine/version.o: ALL_CFLAGS += -DQL_VERSION='"$(VERSION)"' -DQL_COMMIT='"$(COMMIT)"'
$(B)/obj/runtime/cli/%.o: ALL_CFLAGS += -DQL_PREFIX='"$(PREFIX)"'

ifeq ($(V),0)
Q := @
say = @printf '  %-5s %s\n' $(1) $(2)
endif

.PHONY: all
all: $(B)/qlane $(B)/libqlane.a $(B)/libqlane.so

$(B)/obj/%.o: %.c
	@mkdir -p $(@D)
	$(call say,CC,$<)
	$(Q)$(CC) $(ALL_CFLAGS) -MMD -MP -c $< -o $@

$(B)/libqlane.a: $(LIB_OBJ)
	$(call say,AR,$@)
	$(Q)rm -f $@ && $(AR) rcs $@ $^

$(B)/libqlane.so: $(LIB_OBJ)
	$(call say,LD,$@)
	$(Q)$(CC) -shared -Wl,-soname,libqlane.so.0 -Wl,--exclude-libs,ALL $(LDFLAGS) $^ $(LIBS) -o $@

$(B)/qlane: $(CLI_OBJ) $(B)/libqlane.a
	$(call say,LD,$@)
	$(Q)$(CC) $(LDFLAGS) $^ $(LIBS) -o $@

# ---- tests: every tests/unit/*.c is one cmocka program ------------------------------------------------------------
UNIT := $(patsubst tests/unit/%.c,$(B)/unit/%,$(wildcard tests/unit/*.c))
$(B)/unit/%: $(B)/obj/tests/unit/%.o $(B)/libqlane.a
	@mkdir -p $(@D)
	$(call say,LD,$@)
	$(Q)$(CC) $(LDFLAGS) $^ $(LIBS) -lcmocka -o $@

.PHONY: unit
unit: $(UNIT)
	@for t in $^; do echo "== $$t"; $$t || exit 1; done

.PHONY: clean
clean:
	rm -rf $(B)

-include $(shell find $(B)/obj -name '*.d' 2>/dev/null)
.SECONDARY:
