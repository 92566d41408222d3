/* textbench TOKENIZER FILE [SECONDS]: how fast a tokenizer.json loads and how fast it encodes and decodes a text file, on
 * one core. Prints the best of several runs: noise only ever adds time. tools/make_text_fixtures.py --full FILE
 * writes a tokenizer.json with the 248,044 tokens of the real vocabulary. */
#include "runtime/base/json.h"
#include "runtime/qlane.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int fail(const ql_error *err) {
    fprintf(stderr, "textbench: %s: %s\n", ql_status_text(err->status), err->text);
    return 1;
}

int main(int argc, char **argv) {
    if (argc < 3 || argc > 4) {
        fprintf(stderr, "usage: textbench TOKENIZER FILE [SECONDS]\n");
        return 2;
    }
    double budget = argc == 4 ? atof(argv[3]) : 2;
    ql_error err = {0};
    char *text = NULL;
    size_t n = 0;
    if (ql_read_file(argv[2], (size_t)1 << 30, &text, &n, &err) != QL_OK) {
        return fail(&err);
    }
    ql_tokenizer *tokenizer = NULL;
    double load = 1e9, encode = 1e9, decode = 1e9;
    for (int run = 0; run < 3; run++) {
        ql_tokenizer_close(&tokenizer);
        double start = now();
        if (ql_tokenizer_open(&tokenizer, argv[1], &err) != QL_OK) {
            return fail(&err);
        }
        double took = now() - start;
        load = took < load ? took : load;
    }
    int32_t n_ids = 0;
    for (double begin = now(); now() - begin < budget;) {
        int32_t *ids = NULL;
        char *back = NULL;
        size_t back_n = 0;
        double start = now();
        if (ql_tokenizer_encode(tokenizer, text, n, &ids, &n_ids, &err) != QL_OK) {
            return fail(&err);
        }
        double middle = now();
        if (ql_tokenizer_decode(tokenizer, ids, n_ids, 0, &back, &back_n, &err) != QL_OK) {
            return fail(&err);
        }
        double end = now();
        encode = middle - start < encode ? middle - start : encode;
        decode = end - middle < decode ? end - middle : decode;
        free(ids);
        free(back);
    }
    printf("load_s %.3f  encode_MB_s %.1f  decode_MB_s %.1f  bytes %zu  ids %d  bytes_per_id %.2f\n", load,
           (double)n / encode * 1e-6, (double)n / decode * 1e-6, n, (int)n_ids, n_ids ? (double)n / n_ids : 0.0);
    ql_tokenizer_close(&tokenizer);
    free(text);
    return 0;
}
