/* Options of all commands: one table, one parser. Ranges and defaults are said once, in the table, and appear in help
 * and messages from there. */
#include "runtime/cli/cli.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef enum opt_type {
    OPT_FLAG,      /* bool */
    OPT_TEXT,      /* const char * */
    OPT_TEXTS,     /* ql_cli_texts; may be repeated */
    OPT_INT,       /* int64_t in [min, max] */
    OPT_BYTES,     /* int64_t, with an optional K, M, G or T of 1024 */
    OPT_REAL,      /* double in [min, max], or (min, max] */
    OPT_CHOICE,    /* int64_t: index into `choice` */
    OPT_INTS,      /* ql_cli_ints */
    OPT_PRECISION, /* both precisions */
    OPT_SPEC,      /* mtp[:K] */
} opt_type;

typedef struct option {
    const char *name; /* as on the command line */
    opt_type type;
    const char *arg;      /* value's name in help; NULL for flags */
    double min, max;      /* numbers; bytes */
    bool above;           /* min itself is not accepted */
    const char *fallback; /* default, in words */
    const char *help;
    unsigned commands;
    size_t at; /* offset of the value in ql_cli_args */
    const char *const *choice;
} option;

enum {
    MAX_MS = 86400000, /* a day, as the engine accepts it */
    MODEL_CMDS =
        QL_CMD_RUN | QL_CMD_PLAN | QL_CMD_INSPECT | QL_CMD_TOKENIZE | QL_CMD_DETOKENIZE | QL_CMD_CHECK | QL_CMD_BENCH,
    SPEED_CMDS = QL_CMD_RUN | QL_CMD_BENCH,
    SHAPE_CMDS = SPEED_CMDS | QL_CMD_PLAN,
    LANE_CMDS = SPEED_CMDS | QL_CMD_CHECK,
    TEXT_CMDS = QL_CMD_RUN | QL_CMD_TOKENIZE | QL_CMD_DETOKENIZE,
    JSON_CMDS = SPEED_CMDS | QL_CMD_PLAN | QL_CMD_INSPECT,
};

static const char *const device_names[] = {"host", "cuda", NULL};          /* ql_device_kind less one: no auto */
static const char *const kv_names[] = {"f16", "f32", "bf16", "fp8", NULL}; /* ql_kv_type */
static const char *const precision_names[] = {"exact", "bf16", "fp8", "q8", NULL}; /* ql_precision less one: no auto */
static const char *const order_names[] = {"tree", "fast", NULL};                   /* ql_order */

#define AT(field) offsetof(ql_cli_args, field)

static const option table[] = {
    {"-m", OPT_TEXT, "DIR", 0, 0, false, "the bundled model",
     "checkpoint directory, or a Hub id in the local Hugging Face cache", MODEL_CMDS, AT(model), NULL},
    {"-p", OPT_TEXT, "TEXT", 0, 0, false, NULL, "the text: a prompt, or ids for detokenize", TEXT_CMDS, AT(prompt),
     NULL},
    {"-f", OPT_TEXT, "FILE", 0, 0, false, NULL, "read the text from a file; - is standard input", TEXT_CMDS, AT(file),
     NULL},
    {"--ids", OPT_INTS, "1,2,3", 0, 0, false, NULL, "token ids in place of text", QL_CMD_RUN | QL_CMD_DETOKENIZE,
     AT(ids), NULL},
    {"--ids-file", OPT_TEXT, "FILE", 0, 0, false, NULL, "token ids from a file; - is standard input", QL_CMD_RUN,
     AT(ids_file), NULL},
    {"-n", OPT_INT, "N", 1, INT32_MAX, false, "until an end-of-sequence id or the context is full; bench: 128",
     "generate at most N ids", SPEED_CMDS, AT(n), NULL},
    {"--contexts", OPT_INTS, "512,8192", 0, 0, false, "512,8192,32768,131072, as far as the model goes",
     "lengths of the prompts to measure", QL_CMD_BENCH, AT(contexts), NULL},
    {"--runs", OPT_INTS, "3", 0, 0, false, "3",
     "fresh processes for each context, one number or one for each; medians are of these", QL_CMD_BENCH, AT(runs),
     NULL},
    {"--together", OPT_INTS, "1,4", 0, 0, false, NULL,
     "also time steps in which so many sequences generate, each number by itself", QL_CMD_BENCH, AT(together), NULL},
    {"--rows", OPT_INTS, "1,4", 0, 0, false, NULL,
     "also time steps of so many rows of one sequence, as the check of a draft has, each number by itself",
     QL_CMD_BENCH, AT(rows), NULL},
    {"--lanes", OPT_INT, "N", 1, 64, false,
     "every usable GPU that the model allows, else 1 host lane; check: each of 1, 2, 4 and 8 in turn",
     "number of lanes; must divide the model's slice count", SHAPE_CMDS | QL_CMD_CHECK, AT(lanes), NULL},
    {"--devices", OPT_INTS, "0,1", 0, 0, false, NULL, "the GPUs to use, one lane each; in place of --lanes", LANE_CMDS,
     AT(devices), NULL},
    {"--device", OPT_CHOICE, "KIND", 0, 0, false, "GPUs where a usable one exists, else host; plan: host",
     "what lanes run on", SHAPE_CMDS | QL_CMD_CHECK, AT(device), device_names},
    {"--temp", OPT_REAL, "T", 0, 100, false, "the model's generation_config.json, else 0",
     "temperature; 0 takes the likeliest id", QL_CMD_RUN, AT(temp), NULL},
    {"--top-k", OPT_INT, "K", 0, INT32_MAX, false, "the model's, else 0", "sample from the K likeliest ids; 0 is all",
     QL_CMD_RUN, AT(top_k), NULL},
    {"--top-p", OPT_REAL, "P", 0, 1, true, "the model's, else 1",
     "sample from the smallest likeliest set of mass P; 1 is all", QL_CMD_RUN, AT(top_p), NULL},
    {"--min-p", OPT_REAL, "P", 0, 1, false, "0", "drop ids less likely than P times the likeliest", QL_CMD_RUN,
     AT(min_p), NULL},
    {"--rep-pen", OPT_REAL, "R", 0, 100, true, "1", "repetition penalty on ids of prompt and output; 1 is off",
     QL_CMD_RUN, AT(rep_pen), NULL},
    {"--presence", OPT_REAL, "A", -2, 2, false, "0", "subtracted once from ids already generated", QL_CMD_RUN,
     AT(presence), NULL},
    {"--frequency", OPT_REAL, "A", -2, 2, false, "0", "subtracted for each time an id was generated", QL_CMD_RUN,
     AT(frequency), NULL},
    {"--seed", OPT_INT, "N", 0, (double)INT64_MAX, false, "from the clock; --stats and --json name it",
     "seed of the sampler", QL_CMD_RUN, AT(seed), NULL},
    {"--stop", OPT_TEXTS, "TEXT", 0, 0, false, NULL, "stop before this text; up to 16 times", QL_CMD_RUN, AT(stop),
     NULL},
    {"--ctx", OPT_INT, "N", 1, INT32_MAX, false, "the model's limit or what fits, whichever is less",
     "context in tokens", QL_CMD_RUN | QL_CMD_PLAN, AT(ctx), NULL},
    {"--chunk", OPT_INT, "N", 64, 1 << 16, false, "1536", "prompt rows of one step, a multiple of 64", SHAPE_CMDS,
     AT(chunk), NULL},
    {"--seqs", OPT_INT, "N", 1, 256, false, "1", "sequences that a lane has room for", QL_CMD_PLAN, AT(seqs), NULL},
    {"--mem", OPT_BYTES, "BYTES", 1, (double)INT64_MAX, false, "what the device has",
     "memory that one lane may use; K, M, G, T multiply by 1024", SHAPE_CMDS, AT(mem), NULL},
    {"--precision", OPT_PRECISION, "P", 0, 0, false,
     "exact on host lanes; on CUDA prompt=bf16,gen=exact, and q8 on GPUs of compute capability 7.5",
     "of activations: exact, bf16, fp8 or q8, or prompt=P,gen=P", SPEED_CMDS, AT(prompt_precision), NULL},
    {"--kv", OPT_CHOICE, "TYPE", 0, 0, false, "f16", "storage of keys and values", SHAPE_CMDS, AT(kv), kv_names},
    {"--order", OPT_CHOICE, "ORDER", 0, 0, false, "tree",
     "order of sums across lanes: tree has the same bits at any lane count", SPEED_CMDS, AT(order), order_names},
    {"--kernel", OPT_TEXTS, "FAMILY=NAME", 0, 0, false, NULL, "force a kernel variant; may be repeated", LANE_CMDS,
     AT(kernel), NULL},
    {"--spec", OPT_SPEC, "mtp[:K]", 1, 8, false, NULL,
     "count the multi-token-prediction layer (plan); run refuses it: no speculation in this version",
     QL_CMD_RUN | QL_CMD_PLAN, AT(mtp), NULL},
    {"--wait-ms", OPT_INT, "MS", 1, MAX_MS, false, "10000", "deadline of a wait on a lane or peer without progress",
     LANE_CMDS, AT(wait_ms), NULL},
    {"--init-ms", OPT_INT, "MS", 1, MAX_MS, false, "20000", "deadline of communicator set-up", LANE_CMDS, AT(init_ms),
     NULL},
    {"--list", OPT_FLAG, NULL, 0, 0, false, NULL, "print the cases' names, run none", QL_CMD_CHECK, AT(list), NULL},
    {"--long", OPT_FLAG, NULL, 0, 0, false, NULL, "shapes of the 27B and vectors of up to 64 MiB too", QL_CMD_CHECK,
     AT(run_long), NULL},
    {"--ignore-eos", OPT_FLAG, NULL, 0, 0, false, NULL, "go on after an end-of-sequence id", QL_CMD_RUN, AT(ignore_eos),
     NULL},
    {"--json", OPT_FLAG, NULL, 0, 0, false, NULL, "print exactly one JSON object", JSON_CMDS, AT(json), NULL},
    {"--crc", OPT_FLAG, NULL, 0, 0, false, NULL, "CRC-32 of the logits (run) or of each tensor (inspect)",
     QL_CMD_RUN | QL_CMD_INSPECT, AT(crc), NULL},
    {"--stats", OPT_FLAG, NULL, 0, 0, false, NULL, "print speeds, lanes and kernel paths on stderr", QL_CMD_RUN,
     AT(stats), NULL},
    {"--profile", OPT_FLAG, NULL, 0, 0, false, NULL, "as --stats, and the time of each phase", QL_CMD_RUN, AT(profile),
     NULL},
    {"--verify", OPT_FLAG, NULL, 0, 0, false, NULL, "read every resident slice back and compare it with the file",
     QL_CMD_RUN, AT(verify), NULL},
    {"--dump", OPT_TEXT, "DIR", 0, 0, false, NULL, "write the prompt's logits and hidden states as .npy files",
     QL_CMD_RUN, AT(dump), NULL},
    {"--out", OPT_TEXT, "DIR", 0, 0, false, NULL, "write bench.json, bench.csv and bench.svg there", QL_CMD_BENCH,
     AT(out), NULL},
    {"--help", OPT_FLAG, NULL, 0, 0, false, NULL, "print this", MODEL_CMDS, AT(help), NULL},
};

enum { N_OPT = sizeof table / sizeof table[0] };

const char *ql_cli_kv_name(ql_kv_type kv) { return kv_names[kv]; }
const char *ql_cli_precision_name(ql_precision precision) { return precision_names[precision - 1]; }
const char *ql_cli_order_name(ql_order order) { return order_names[order]; }

/* "f16, f32, bf16 or fp8" */
static void list_choices(const char *const *choice, char *out, size_t cap) {
    size_t len = 0;
    out[0] = 0;
    for (int i = 0; choice[i]; i++) {
        const char *sep = i == 0 ? "" : choice[i + 1] ? ", " : " or ";
        int n = snprintf(out + len, cap - len, "%s%s", sep, choice[i]);
        if (n < 0 || (size_t)n >= cap - len) {
            return;
        }
        len += (size_t)n;
    }
}

/* What a value must be, for messages and help: "an integer from 1 to 64". */
static void describe(const option *o, char *out, size_t cap) {
    char names[128];
    switch (o->type) {
    case OPT_FLAG: snprintf(out, cap, "no value"); return;
    case OPT_TEXT:
    case OPT_TEXTS: snprintf(out, cap, "%s", o->arg); return;
    case OPT_INT:
        if (o->max >= (double)INT64_MAX) {
            snprintf(out, cap, "an integer from %.0f to %lld", o->min, (long long)INT64_MAX);
        } else {
            snprintf(out, cap, "an integer from %.0f to %.0f", o->min, o->max);
        }
        return;
    case OPT_BYTES: snprintf(out, cap, "a number of bytes such as 80000000000, 512M or 80G"); return;
    case OPT_REAL:
        snprintf(out, cap, o->above ? "a number above %g, at most %g" : "a number from %g to %g", o->min, o->max);
        return;
    case OPT_CHOICE:
        list_choices(o->choice, names, sizeof names);
        snprintf(out, cap, "%s", names);
        return;
    case OPT_INTS: snprintf(out, cap, "integers such as %s", o->arg); return;
    case OPT_PRECISION: snprintf(out, cap, "exact, bf16, fp8 or q8, or prompt=P,gen=P"); return;
    case OPT_SPEC: snprintf(out, cap, "mtp or mtp:K with K from %.0f to %.0f", o->min, o->max); return;
    }
}

static int bad_value(const option *o, const char *value) {
    char want[256];
    describe(o, want, sizeof want);
    return ql_cli_fail(QL_EXIT_USAGE, "%s wants %s, not '%.80s'", o->name, want, value);
}

/* Decimal digits with an optional minus, nothing around them. */
static bool parse_int(const char *text, int64_t *out) {
    const char *digits = text[0] == '-' ? text + 1 : text;
    if (!digits[0] || digits[strspn(digits, "0123456789")]) {
        return false;
    }
    errno = 0;
    *out = strtoll(text, NULL, 10);
    return errno == 0;
}

static bool parse_real(const char *text, double *out) {
    if (!text[0] || text[strspn(text, "+-.0123456789eE")]) { /* no blanks, hexadecimal, "inf" or "nan" */
        return false;
    }
    char *end;
    *out = strtod(text, &end);
    return *end == 0 && isfinite(*out);
}

static bool parse_bytes(const char *text, int64_t *out) {
    static const char units[] = "KMGT";
    size_t digits = strspn(text, "0123456789");
    char number[24];
    if (digits == 0 || digits >= sizeof number) {
        return false;
    }
    memcpy(number, text, digits);
    number[digits] = 0;
    int64_t n;
    if (!parse_int(number, &n)) {
        return false;
    }
    if (text[digits]) {
        const char *unit = strchr(units, text[digits]);
        if (!unit || text[digits + 1] || __builtin_mul_overflow(n, (int64_t)1 << (10 * (unit - units + 1)), &n)) {
            return false;
        }
    }
    *out = n;
    return true;
}

bool ql_cli_parse_ints(const char *text, size_t bytes, ql_cli_ints *out, size_t *bad) {
    static const char blanks[] = " \t\r\n";
    size_t i = 0, n = 0, cap = 1;
    for (size_t j = 0; j < bytes; j++) {
        cap += text[j] == ',';
    }
    *bad = 0;
    int32_t *v = cap <= INT32_MAX ? malloc(cap * sizeof *v) : NULL;
    if (!v) {
        return false;
    }
    while (i < bytes && text[i] && strchr(blanks, text[i])) {
        i++;
    }
    while (i < bytes) {
        int64_t value = 0;
        size_t start = i;
        while (i < bytes && text[i] >= '0' && text[i] <= '9' && value <= INT32_MAX) {
            value = value * 10 + (text[i++] - '0');
        }
        if (i == start || value > INT32_MAX) {
            *bad = start;
            free(v);
            return false;
        }
        v[n++] = (int32_t)value;
        while (i < bytes && text[i] && strchr(blanks, text[i])) {
            i++;
        }
        if (i == bytes) {
            break;
        }
        if (text[i] != ',') {
            *bad = i;
            free(v);
            return false;
        }
        i++;
        while (i < bytes && text[i] && strchr(blanks, text[i])) {
            i++;
        }
        if (i == bytes) { /* a comma promises another number */
            *bad = i - 1;
            free(v);
            return false;
        }
    }
    out->v = v;
    out->n = (int32_t)n;
    return true;
}

static bool precision_of_name(const char *name, size_t len, ql_precision *out) {
    for (int i = 0; precision_names[i]; i++) {
        if (strlen(precision_names[i]) == len && memcmp(precision_names[i], name, len) == 0) {
            *out = (ql_precision)(i + 1);
            return true;
        }
    }
    return false;
}

/* "X" for both phases, or "prompt=X", "gen=Y", or both with a comma. */
static bool parse_precision(const char *text, ql_cli_args *args) {
    if (!strchr(text, '=')) {
        bool ok = precision_of_name(text, strlen(text), &args->prompt_precision);
        args->gen_precision = args->prompt_precision;
        return ok;
    }
    bool prompt = false, gen = false;
    while (true) {
        size_t len = strcspn(text, ",");
        if (strncmp(text, "prompt=", 7) == 0 && !prompt) {
            prompt = precision_of_name(text + 7, len - 7, &args->prompt_precision);
            if (!prompt) {
                return false;
            }
        } else if (strncmp(text, "gen=", 4) == 0 && !gen) {
            gen = precision_of_name(text + 4, len - 4, &args->gen_precision);
            if (!gen) {
                return false;
            }
        } else {
            return false;
        }
        if (!text[len]) {
            return true;
        }
        text += len + 1;
    }
}

static bool parse_spec(const option *o, const char *text, int64_t *k) {
    if (strncmp(text, "mtp", 3) != 0) {
        return false;
    }
    *k = 1;
    return text[3] == 0 || (text[3] == ':' && parse_int(text + 4, k) && *k >= o->min && *k <= o->max);
}

/* Appends to a list of strings that argv owns. */
static int append(ql_cli_texts *list, const char *value) {
    const char **grown = realloc(list->v, ((size_t)list->n + 1) * sizeof *grown);
    if (!grown) {
        return ql_cli_fail(QL_EXIT_MEMORY, "out of memory for options");
    }
    list->v = grown;
    list->v[list->n++] = value;
    return 0;
}

static int set_value(ql_cli_args *args, const option *o, const char *value) {
    void *at = (char *)args + o->at;
    int64_t i;
    double r;
    size_t bad;
    switch (o->type) {
    case OPT_FLAG: *(bool *)at = true; return 0;
    case OPT_TEXT: *(const char **)at = value; return 0;
    case OPT_TEXTS: return append(at, value);
    case OPT_INT:
        if (!parse_int(value, &i) || (double)i < o->min || (double)i > o->max) {
            return bad_value(o, value);
        }
        *(int64_t *)at = i;
        return 0;
    case OPT_BYTES:
        if (!parse_bytes(value, &i) || (double)i < o->min) {
            return bad_value(o, value);
        }
        *(int64_t *)at = i;
        return 0;
    case OPT_REAL:
        if (!parse_real(value, &r) || r < o->min || r > o->max || (o->above && !(r > o->min))) {
            return bad_value(o, value);
        }
        *(double *)at = r;
        return 0;
    case OPT_CHOICE:
        for (i = 0; o->choice[i]; i++) {
            if (strcmp(o->choice[i], value) == 0) {
                *(int64_t *)at = i;
                return 0;
            }
        }
        return bad_value(o, value);
    case OPT_INTS: return ql_cli_parse_ints(value, strlen(value), at, &bad) ? 0 : bad_value(o, value);
    case OPT_PRECISION: return parse_precision(value, args) ? 0 : bad_value(o, value);
    case OPT_SPEC: return parse_spec(o, value, at) ? 0 : bad_value(o, value);
    }
    return QL_EXIT_FAILED;
}

/* Edits that turn a into b; names are short, longer ones are cut. */
static int distance(const char *a, size_t n, const char *b) {
    enum { CAP = 32 };
    int row[CAP + 1];
    size_t m = strlen(b);
    n = n > CAP ? CAP : n;
    m = m > CAP ? CAP : m;
    for (size_t j = 0; j <= m; j++) {
        row[j] = (int)j;
    }
    for (size_t i = 1; i <= n; i++) {
        int diagonal = row[0];
        row[0] = (int)i;
        for (size_t j = 1; j <= m; j++) {
            int best = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            best = best < row[j] + 1 ? best : row[j] + 1;
            row[j] = best < row[j - 1] + 1 ? best : row[j - 1] + 1;
        }
    }
    return row[m];
}

static int unknown_option(enum ql_cli_command command, const char *command_name, const char *given, size_t len) {
    const option *near = NULL;
    bool elsewhere = false;
    int best = INT_MAX;
    for (int i = 0; i < N_OPT; i++) {
        int d = distance(given, len, table[i].name);
        elsewhere |= d == 0;
        if ((table[i].commands & command) && d < best) {
            best = d;
            near = &table[i];
        }
    }
    return ql_cli_fail(QL_EXIT_USAGE, "%s has no option '%.*s'%s; the nearest is %s (see qlane help %s)", command_name,
                       (int)(len > 80 ? 80 : len), given, elsewhere ? ", another command has" : "", near->name,
                       command_name);
}

int ql_cli_parse(ql_cli_args *args, enum ql_cli_command command, const char *command_name, int argc, char **argv) {
    bool seen[N_OPT] = {false};
    *args = (ql_cli_args){.n = -1,
                          .lanes = -1,
                          .seqs = -1,
                          .ctx = -1,
                          .chunk = -1,
                          .mem = -1,
                          .seed = -1,
                          .top_k = -1,
                          .wait_ms = -1,
                          .init_ms = -1,
                          .temp = NAN,
                          .top_p = NAN,
                          .min_p = NAN,
                          .rep_pen = NAN,
                          .presence = NAN,
                          .frequency = NAN,
                          .device = -1,
                          .kv = -1,
                          .order = -1};
    for (int i = 0; i < argc; i++) {
        const char *given = argv[i];
        if (given[0] != '-' || !given[1]) {
            if (command == QL_CMD_CHECK && given[0]) {
                int rc = append(&args->names, given);
                if (rc) {
                    return rc;
                }
                continue;
            }
            return ql_cli_fail(QL_EXIT_USAGE, "%s takes no argument '%.80s'; options begin with - (see qlane help %s)",
                               command_name, given, command_name);
        }
        const char *value = strncmp(given, "--", 2) == 0 ? strchr(given, '=') : NULL;
        size_t len = value ? (size_t)(value++ - given) : strlen(given);
        const char *name = len == 2 && memcmp(given, "-h", 2) == 0 ? "--help" : given;
        size_t name_len = name == given ? len : strlen(name);
        int k = 0;
        while (k < N_OPT && !((table[k].commands & command) && strlen(table[k].name) == name_len &&
                              memcmp(table[k].name, name, name_len) == 0)) {
            k++;
        }
        if (k == N_OPT) {
            return unknown_option(command, command_name, given, len);
        }
        const option *o = &table[k];
        if (seen[k] && o->type != OPT_TEXTS) {
            return ql_cli_fail(QL_EXIT_USAGE, "%s is given twice", o->name);
        }
        seen[k] = true;
        if (o->type == OPT_FLAG && value) {
            return ql_cli_fail(QL_EXIT_USAGE, "%s takes no value", o->name);
        }
        if (o->type != OPT_FLAG && !value) {
            if (++i == argc) {
                char want[256];
                describe(o, want, sizeof want);
                return ql_cli_fail(QL_EXIT_USAGE, "%s wants a value: %s", o->name, want);
            }
            value = argv[i];
        }
        int rc = set_value(args, o, value);
        if (rc) {
            return rc;
        }
        args->has_ids |= o->at == AT(ids);
        args->has_devices |= o->at == AT(devices);
        args->has_contexts |= o->at == AT(contexts);
        args->has_runs |= o->at == AT(runs);
        args->has_together |= o->at == AT(together);
        args->has_rows |= o->at == AT(rows);
    }
    return 0;
}

void ql_cli_args_deinit(ql_cli_args *args) {
    free(args->ids.v);
    free(args->devices.v);
    free(args->contexts.v);
    free(args->runs.v);
    free(args->together.v);
    free(args->rows.v);
    free(args->stop.v);
    free(args->kernel.v);
    free(args->names.v);
}

void ql_cli_options_help(FILE *out, enum ql_cli_command command) {
    for (int i = 0; i < N_OPT; i++) {
        const option *o = &table[i];
        if (!(o->commands & command)) {
            continue;
        }
        char left[64], want[256];
        bool ranged = o->type == OPT_INT || o->type == OPT_REAL || o->type == OPT_CHOICE;
        snprintf(left, sizeof left, "%s%s%s", o->name, o->arg ? " " : "", o->arg ? o->arg : "");
        fprintf(out, "  %-20s  %s\n", left, o->help);
        if (ranged || o->fallback) {
            describe(o, want, sizeof want);
            fprintf(out, "  %-20s  %s%s%s%s\n", "", ranged ? want : "", ranged && o->fallback ? "; " : "",
                    o->fallback ? "default: " : "", o->fallback ? o->fallback : "");
        }
    }
}

int ql_cli_fill_options(const ql_cli_args *args, ql_options *opt, char **kernels) {
    *kernels = NULL;
    if (args->chunk >= 0 && args->chunk % 64 != 0) {
        return ql_cli_fail(QL_EXIT_USAGE, "--chunk wants a multiple of 64, not '%lld'", (long long)args->chunk);
    }
    if (args->has_devices) {
        if (args->lanes >= 0) {
            return ql_cli_fail(QL_EXIT_USAGE, "--lanes and --devices exclude each other");
        }
        if (args->device == QL_DEVICE_HOST - 1) {
            return ql_cli_fail(QL_EXIT_USAGE, "--devices names GPUs and cannot go with --device host");
        }
        if (args->devices.n < 1 || args->devices.n > 64) {
            return ql_cli_fail(QL_EXIT_USAGE, "--devices wants 1 to 64 GPUs, not %d", args->devices.n);
        }
        opt->devices = args->devices.v;
        opt->lanes = args->devices.n;
        opt->device = QL_DEVICE_CUDA;
    }
    if (args->device >= 0) {
        opt->device = (ql_device_kind)(args->device + 1);
    }
    if (args->lanes >= 0) {
        opt->lanes = (int32_t)args->lanes;
    }
    if (args->ctx >= 0) {
        opt->ctx = (int32_t)args->ctx;
    }
    if (args->chunk >= 0) {
        opt->chunk = (int32_t)args->chunk;
    }
    if (args->mem >= 0) {
        opt->mem_bytes = (uint64_t)args->mem;
    }
    if (args->kv >= 0) {
        opt->kv = (ql_kv_type)args->kv;
    }
    if (args->wait_ms >= 0) {
        opt->wait_ms = (int32_t)args->wait_ms;
    }
    if (args->init_ms >= 0) {
        opt->init_ms = (int32_t)args->init_ms;
    }
    opt->max_seqs = args->seqs >= 0 ? (int32_t)args->seqs : 1;
    opt->prompt_precision = args->prompt_precision;
    opt->gen_precision = args->gen_precision;
    if (args->order >= 0) {
        opt->order = (ql_order)args->order;
    }
    opt->verify = args->verify;
    opt->profile = args->profile;
    if (args->kernel.n) {
        size_t bytes = 1;
        for (int32_t i = 0; i < args->kernel.n; i++) {
            const char *value = args->kernel.v[i], *eq = strchr(value, '=');
            if (!eq || eq == value || !eq[1] || strchr(value, ',')) {
                return ql_cli_fail(QL_EXIT_USAGE, "--kernel wants FAMILY=NAME, not '%.80s'", value);
            }
            bytes += strlen(value) + 1;
        }
        char *joined = malloc(bytes), *end = joined;
        if (!joined) {
            return ql_cli_fail(QL_EXIT_MEMORY, "out of memory for options");
        }
        for (int32_t i = 0; i < args->kernel.n; i++) {
            size_t len = strlen(args->kernel.v[i]);
            if (i) {
                *end++ = ',';
            }
            memcpy(end, args->kernel.v[i], len);
            end += len;
        }
        *end = 0;
        *kernels = joined;
        opt->kernels = joined;
    }
    return 0;
}
