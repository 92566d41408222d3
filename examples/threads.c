/* qlane inside a threaded host program: eight threads ask at once, one of them changes its mind, and the engine is opened
 * and closed many times without the process growing.
 *
 *     build/examples/threads [MODEL_DIR]
 *
 * docs/embedding.md walks through it. It checks what it shows, so that it can run as a test.
 */
#include "runtime/qlane.h" /* <qlane.h> when installed */

#include <dirent.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ASKERS = 8, QUESTIONS = 3, ROUNDS = 100, WARM_ROUNDS = 10 };

static int n_passed, n_failed;

static void check(int ok, const char *what) {
    printf("%s %s\n", ok ? "ok  " : "FAIL", what);
    n_passed += ok != 0;
    n_failed += ok == 0;
}

static ql_options options(const char *model) {
    ql_options opt = ql_options_default();
    opt.model = model;
    opt.device = QL_DEVICE_HOST;
    opt.lanes = 2;
    opt.ctx = 512;
    opt.max_seqs = ASKERS;
    return opt;
}

static ql_request question(const char *text, int32_t max_new) {
    ql_request req = ql_request_default();
    req.text = text;
    req.max_new = max_new;
    req.model_sampling = 0; /* our own settings: greedy, so that answers can be compared */
    return req;
}

/* ---- eight threads ask ------------------------------------------------------------------------------------------ */

typedef struct asker {
    ql_engine *engine;
    int right; /* answers that were as expected */
} asker;

static void *ask(void *arg) {
    static const char *const text[QUESTIONS] = {"The capital of France is", "The capital of Japan is",
                                                "The capital of Spain is"};
    static const char *const answer[QUESTIONS] = {" Paris", " Tokyo", " Madrid"};
    asker *a = arg;
    for (int i = 0; i < QUESTIONS; i++) {
        ql_error err = {0};
        ql_result *res = NULL;
        ql_request req = question(text[i], 4);
        if (ql_generate(a->engine, &req, &res, &err) != QL_OK) {
            fprintf(stderr, "%s\n", err.text);
        } else if (strncmp(res->text, answer[i], strlen(answer[i])) == 0) {
            a->right++;
        }
        ql_result_free(res);
    }
    return NULL;
}

/* ---- one thread changes its mind --------------------------------------------------------------------------------- */

typedef struct canceller {
    ql_engine *engine;
    int n_tokens;
    ql_finish finish;
} canceller;

/* Runs on the engine's conductor thread; it may cancel but must not block. */
static void on_event(void *user, const ql_event *event) {
    canceller *c = user;
    if (event->kind == QL_EVENT_TOKEN && ++c->n_tokens == 5) {
        ql_cancel(c->engine, event->request);
    }
}

static void *ask_and_cancel(void *arg) {
    canceller *c = arg;
    ql_error err = {0};
    ql_result *res = NULL;
    ql_request_id id;
    ql_request req = question("The capital of France is", 400);
    req.ignore_eos = 1;
    if (ql_submit(c->engine, &req, on_event, c, &id, &err) != QL_OK || ql_wait(c->engine, id, &res, &err) != QL_OK) {
        fprintf(stderr, "%s\n", err.text);
    } else {
        c->finish = res->finish;
    }
    ql_result_free(res);
    return NULL;
}

static void threads_ask(const char *model) {
    ql_error err = {0};
    ql_engine *engine = NULL;
    ql_options opt = options(model);
    if (ql_engine_open(&engine, &opt, &err) != QL_OK) {
        fprintf(stderr, "%s: %s\n", ql_status_text(err.status), err.text);
        check(0, "the engine opens");
        return;
    }
    pthread_t thread[ASKERS + 1];
    asker askers[ASKERS];
    canceller c = {.engine = engine};
    int right = 0;
    for (int i = 0; i < ASKERS; i++) {
        askers[i] = (asker){.engine = engine};
        if (pthread_create(&thread[i], NULL, ask, &askers[i]) != 0) {
            abort();
        }
    }
    if (pthread_create(&thread[ASKERS], NULL, ask_and_cancel, &c) != 0) {
        abort();
    }
    for (int i = 0; i <= ASKERS; i++) {
        pthread_join(thread[i], NULL);
    }
    for (int i = 0; i < ASKERS; i++) {
        right += askers[i].right;
    }
    check(right == ASKERS * QUESTIONS, "every thread gets every answer");
    check(c.finish == QL_FINISH_CANCEL && c.n_tokens <= 6, "a cancelled request ends at the next step");
    ql_engine_close(&engine);
    check(engine == NULL, "close clears the handle");
}

/* ---- open and close, many times ------------------------------------------------------------------------------------ */

typedef struct usage {
    long resident_kb;
    int threads, files;
} usage;

static int count_entries(const char *path) {
    int n = 0;
    DIR *dir = opendir(path);
    for (struct dirent *e; dir && (e = readdir(dir));) {
        n++;
    }
    if (dir) {
        closedir(dir);
    }
    return n;
}

static usage measure(void) {
    usage u = {0};
    long pages = 0, resident = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (f && fscanf(f, "%ld %ld", &pages, &resident) == 2) {
        u.resident_kb = resident * (sysconf(_SC_PAGESIZE) / 1024);
    }
    if (f) {
        fclose(f);
    }
    u.threads = count_entries("/proc/self/task");
    u.files = count_entries("/proc/self/fd");
    return u;
}

static void open_and_close(const char *model) {
    usage before = {0};
    int opened = 0;
    for (int i = 0; i < ROUNDS; i++) {
        ql_error err = {0};
        ql_engine *engine = NULL;
        ql_options opt = options(model);
        if (ql_engine_open(&engine, &opt, &err) == QL_OK) {
            opened++;
        }
        ql_engine_close(&engine);
        if (i == WARM_ROUNDS - 1) {
            before = measure();
        }
    }
    usage after = measure();
    printf("     %ld kB resident after %d rounds, %ld kB after %d\n", before.resident_kb, WARM_ROUNDS,
           after.resident_kb, ROUNDS);
    check(opened == ROUNDS, "every open succeeds");
    check(after.threads == before.threads, "no thread is left behind");
    check(after.files == before.files, "no file is left open");
    /* The allocator's own slack moves by a megabyte or two; a leak of 64 kB a round would be 5.7 MB. */
    check(after.resident_kb < before.resident_kb + 4096, "memory does not grow");
}

int main(int argc, char **argv) {
    const char *model = argc > 1 ? argv[1] : "models/tiny";
    threads_ask(model);
    open_and_close(model);
    printf("%d passed, %d failed, 0 skipped\n", n_passed, n_failed);
    return n_failed != 0;
}
