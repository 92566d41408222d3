/* The command's shared pieces: options, messages, the model that is meant, terminal.
 *
 * The command is written on qlane.h alone, as any other program would be; nothing here reaches into the library. One
 * file holds one command; a command is a function that takes parsed options and returns the exit code.
 */
#ifndef QL_RUNTIME_CLI_CLI_H
#define QL_RUNTIME_CLI_CLI_H

#include "runtime/qlane.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>

enum ql_cli_exit {
    QL_EXIT_OK = 0,
    QL_EXIT_FAILED = 1,      /* standard output cannot be written, a check failed, or a broken invariant of ours */
    QL_EXIT_USAGE = 2,       /* unknown option, bad value, lanes that do not divide, bad token id, empty prompt */
    QL_EXIT_MODEL = 3,       /* bad model or input file, or --dump cannot be written */
    QL_EXIT_DEVICE = 4,      /* device or collective failure, fewer GPUs than lanes */
    QL_EXIT_MEMORY = 5,      /* out of host or device memory */
    QL_EXIT_INTERRUPT = 130, /* stopped by Ctrl-C */
};

#if defined(__GNUC__)
#define QL_CLI_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#else
#define QL_CLI_PRINTF(fmt, args)
#endif

/* Prints "qlane: " and one line to stderr. */
void ql_cli_say(const char *fmt, ...) QL_CLI_PRINTF(1, 2);

/* The same; returns `code`, so that a command can `return` it. */
int ql_cli_fail(int code, const char *fmt, ...) QL_CLI_PRINTF(2, 3);

/* Prints err's text and returns the exit code of its status. */
int ql_cli_fail_err(const ql_error *err);

/* The library's log lines on stderr. Errors also come back from the call that fails, which prints them; only while an
 * engine closes nothing else would show them. */
typedef struct ql_cli_logger {
    bool info;    /* show informative lines too */
    bool closing; /* atomic */
} ql_cli_logger;

void ql_cli_log(void *user, ql_log_level level, const char *line); /* a ql_log_fn; user is the logger */

/* ---- options: one table in options.c -------------------------------------------------------------------------- */

enum ql_cli_command {
    QL_CMD_RUN = 1,
    QL_CMD_PLAN = 2,
    QL_CMD_INSPECT = 4,
    QL_CMD_TOKENIZE = 8,
    QL_CMD_DETOKENIZE = 16,
    QL_CMD_CHECK = 32,
    QL_CMD_BENCH = 64,
};

typedef struct ql_cli_ints {
    int32_t *v; /* malloc'ed */
    int32_t n;
} ql_cli_ints;

typedef struct ql_cli_texts {
    const char **v; /* the array malloc'ed, the strings borrowed from argv */
    int32_t n;
} ql_cli_texts;

/* Values as given; "not given" is NULL, 0 entries, -1, NAN or false. */
typedef struct ql_cli_args {
    const char *model, *prompt, *file, *ids_file, *dump, *out;
    bool has_ids, has_devices, has_contexts, has_runs, has_together, has_rows;
    ql_cli_ints ids, devices, contexts, runs, together, rows;
    int64_t n, lanes, seqs, ctx, chunk, mem, seed, top_k, wait_ms, init_ms;
    double temp, top_p, min_p, rep_pen, presence, frequency;
    int64_t device, kv, order; /* index into the option's list of names */
    ql_precision prompt_precision, gen_precision;
    int64_t mtp; /* drafted tokens of --spec mtp[:K] */
    ql_cli_texts stop, kernel;
    ql_cli_texts names; /* what is no option: check alone takes that */
    bool json, crc, stats, verify, profile, list, run_long, ignore_eos;
    bool help;
} ql_cli_args;

/* Parses argv[0..argc) for one command. Returns 0, or prints one line and returns QL_EXIT_USAGE. Release with
 * ql_cli_args_deinit in either case. */
int ql_cli_parse(ql_cli_args *args, enum ql_cli_command command, const char *command_name, int argc, char **argv);
void ql_cli_args_deinit(ql_cli_args *args);

/* Writes the options of a command, one line each, with value, range and default. */
void ql_cli_options_help(FILE *out, enum ql_cli_command command);

/* Parses "1,2,3"; blanks around numbers are allowed. Returns false on anything else, or when a number exceeds
 * int32_t; *bad is then where. An empty or blank text gives 0 entries. */
bool ql_cli_parse_ints(const char *text, size_t bytes, ql_cli_ints *out, size_t *bad);

/* Fills lanes, device, context, cache, precision and kernels of the library's options. `kernels` receives the joined
 * --kernel values, which `opt` borrows; the caller frees it. Returns 0 or an exit code. */
int ql_cli_fill_options(const ql_cli_args *args, ql_options *opt, char **kernels);

/* Names as on the command line. */
const char *ql_cli_kv_name(ql_kv_type kv);
const char *ql_cli_precision_name(ql_precision precision); /* not AUTO */
const char *ql_cli_order_name(ql_order order);

/* ---- input and output ------------------------------------------------------------------------------------------- */

/* The model of -m, or the bundled one: beside the executable, then where it was installed. Returns 0 and a path in
 * `path`, or prints what was looked for and returns QL_EXIT_MODEL. */
int ql_cli_model(const ql_cli_args *args, char *path, size_t cap);

/* Reads a file, or standard input for "-". *data is NUL-terminated and the caller's. Returns 0 or an exit code. */
int ql_cli_read(const char *path, char **data, size_t *bytes);

/* The text of -p or -f, else standard input. As ql_cli_read. */
int ql_cli_input(const ql_cli_args *args, char **data, size_t *bytes);

/* Makes the folder where it does not exist; refuses anything else that is there, and paths of QL_CLI_FOLDER_BYTES and more.
 * Returns 0 or an exit code. */
enum { QL_CLI_FOLDER_BYTES = 4032 };
int ql_cli_folder(const char *option, const char *dir);

/* Flushes standard output. A reader that went away is no error (QL_EXIT_OK); other failures print a line. */
int ql_cli_flush(void);

/* Whether standard output is a terminal. */
bool ql_cli_is_terminal(void);

/* Prints one JSON object and a newline on standard output and drops the reference. Returns an exit code. */
int ql_cli_print_json(json_t *object);

/* n with commas: "10,354,076,160". `out` holds 32 bytes; returns it. */
char *ql_cli_commas(uint64_t n, char *out);

/* n in a unit that keeps it short: "10.4 GB". `out` holds 32 bytes; returns it. */
char *ql_cli_bytes(uint64_t n, char *out);

/* A bar on stderr while weights load; silent unless stderr is a terminal. */
typedef struct ql_cli_bar {
    bool on, drawn;
    double start_s, last_s;
} ql_cli_bar;

void ql_cli_bar_init(ql_cli_bar *bar);
void ql_cli_bar_progress(void *user, uint64_t done_bytes, uint64_t total_bytes); /* a ql_progress_fn; user is the bar */
void ql_cli_bar_clear(ql_cli_bar *bar);

double ql_cli_now(void); /* seconds on the monotonic clock */

/* ---- --dump: intermediate rows as .npy files ---------------------------------------------------------------------- */

typedef struct ql_cli_dump ql_cli_dump;

/* n_tok is the prompt's length; dir was accepted by ql_cli_folder. Returns 0 or an exit code. */
int ql_cli_dump_open(ql_cli_dump **dump, const char *dir, int32_t n_tok);

/* The probe to pass to the request, with the dump as its user. */
void ql_cli_dump_probe(void *user, ql_probe_kind kind, int32_t layer, int32_t row0, int32_t n_row, int32_t width,
                       const float *values);

/* Completes the files when `keep`, else removes what was written. Returns 0, or prints the first write failure and
 * returns QL_EXIT_MODEL. Sets *dump to NULL, accepts NULL. */
int ql_cli_dump_close(ql_cli_dump **dump, bool keep);

/* ---- what bench writes ---------------------------------------------------------------------------------------------- */

/* A table for people on standard output, from the object that --json prints. */
void ql_cli_bench_table(const json_t *result);

/* bench.json, bench.csv and bench.svg in the folder `dir`. Returns 0 or an exit code. */
int ql_cli_bench_write(const json_t *result, const char *dir);

/* ---- commands ------------------------------------------------------------------------------------------------------ */

int ql_cli_run(const ql_cli_args *args);
int ql_cli_bench(const ql_cli_args *args);
int ql_cli_plan(const ql_cli_args *args);
int ql_cli_inspect(const ql_cli_args *args);
int ql_cli_tokenize(const ql_cli_args *args);
int ql_cli_detokenize(const ql_cli_args *args);
int ql_cli_check(const ql_cli_args *args);

#endif
