/* The qlane command: picks the command and prints help. */
#include "runtime/cli/cli.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>

typedef struct command {
    const char *name;
    enum ql_cli_command id;
    const char *help, *usage;
    int (*run)(const ql_cli_args *args);
} command;

static const command commands[] = {
    {"run", QL_CMD_RUN, "generate text from a prompt",
     "qlane run [-m DIR] [-p TEXT | -f FILE | --ids 1,2,3 | --ids-file FILE] [-n N] [--lanes N | --devices 0,1] "
     "[options]",
     ql_cli_run},
    {"bench", QL_CMD_BENCH, "speeds over context, with all that makes them comparable",
     "qlane bench [-m DIR] [--lanes N | --devices 0,1] [--contexts 512,8192] [-n N] [--runs N] [--together 1,4] "
     "[--rows 1,4]\n"
     "            [--out DIR] [options]",
     ql_cli_bench},
    {"plan", QL_CMD_PLAN, "what each lane would hold and which contexts fit; needs no GPU",
     "qlane plan [-m DIR] [--lanes N] [--ctx N] [--mem BYTES] [options]", ql_cli_plan},
    {"inspect", QL_CMD_INSPECT, "tensors, formats, scheme, scales and checksums of a checkpoint",
     "qlane inspect [-m DIR] [options]", ql_cli_inspect},
    {"tokenize", QL_CMD_TOKENIZE, "text on standard input, -p or -f to comma-separated ids",
     "qlane tokenize [-m DIR] [-p TEXT | -f FILE]", ql_cli_tokenize},
    {"detokenize", QL_CMD_DETOKENIZE, "comma-separated ids on standard input, -p, -f or --ids to text",
     "qlane detokenize [-m DIR] [-p 1,2,3 | -f FILE | --ids 1,2,3]", ql_cli_detokenize},
    {"check", QL_CMD_CHECK, "self-checks of collectives, sharded layers and precisions on this machine",
     "qlane check [--list] [--long] [--device KIND] [--lanes N] [NAME]...", ql_cli_check},
};

enum { N_COMMAND = sizeof commands / sizeof commands[0] };

static const command *find_command(const char *name) {
    for (int i = 0; i < N_COMMAND; i++) {
        if (strcmp(commands[i].name, name) == 0) {
            return &commands[i];
        }
    }
    return NULL;
}

static int unknown_command(const char *name) {
    return ql_cli_fail(QL_EXIT_USAGE,
                       "no command '%.80s'; the commands are run, bench, plan, inspect, tokenize, detokenize and check",
                       name);
}

static void print_overview(FILE *out) {
    fputs("qlane runs Qwen3.5 / 3.6 / 3.8 dense text models from quantized safetensors over lanes of one machine.\n\n",
          out);
    for (int i = 0; i < N_COMMAND; i++) {
        fprintf(out, "  qlane %-11s %s\n", commands[i].name, commands[i].help);
    }
    fputs("\n  qlane help COMMAND   its options\n  qlane --version      version, commit, what it was built with\n",
          out);
}

static int print_command_help(const command *c) {
    printf("usage: %s\n%s\n\n", c->usage, c->help);
    if (c->id == QL_CMD_CHECK) {
        for (int32_t i = 0; ql_check_name(i); i++) {
            printf("  %-20s  %s\n", ql_check_name(i), ql_check_about(i));
        }
        puts("  NAME is one of these or the beginning of a case's name; without one all run\n");
    }
    ql_cli_options_help(stdout, c->id);
    return ql_cli_flush();
}

int main(int argc, char **argv) {
    signal(SIGPIPE, SIG_IGN); /* a reader that went away is seen where we write */
    /* CUDA loads kernels when they are first called, which a first prompt over two GPUs pays with 45 ms; all at once they
     * take none of the time of opening. An environment that says otherwise wins. */
    setenv("CUDA_MODULE_LOADING", "EAGER", 0);
    if (argc < 2) {
        print_overview(stderr);
        return QL_EXIT_USAGE;
    }
    const char *name = argv[1];
    if (strcmp(name, "--version") == 0 && argc == 2) {
        printf("qlane %s\n", ql_version());
        return ql_cli_flush();
    }
    if (strcmp(name, "help") == 0 || strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0) {
        if (argc > 3) {
            return ql_cli_fail(QL_EXIT_USAGE, "%s takes one command", name);
        }
        if (argc == 3) {
            const command *c = find_command(argv[2]);
            return c ? print_command_help(c) : unknown_command(argv[2]);
        }
        print_overview(stdout);
        return ql_cli_flush();
    }
    const command *c = find_command(name);
    if (!c) {
        return unknown_command(name);
    }
    ql_cli_args args;
    int rc = ql_cli_parse(&args, c->id, c->name, argc - 2, argv + 2);
    if (rc == 0) {
        rc = args.help ? print_command_help(c) : c->run(&args);
    }
    ql_cli_args_deinit(&args);
    return rc;
}
