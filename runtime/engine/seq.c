/* One request from submit to result: its ids, its text, its penalties. */
#include "runtime/engine/engine_impl.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

ql_request ql_request_default(void) {
    return (ql_request){
        .size = sizeof(ql_request),
        .sampling = {.top_p = 1, .repetition_penalty = 1},
        .model_sampling = 1,
    };
}

const char *ql_finish_text(ql_finish finish) {
    switch (finish) {
    case QL_FINISH_EOS: return "eos";
    case QL_FINISH_STOP: return "stop";
    case QL_FINISH_LENGTH: return "length";
    case QL_FINISH_CANCEL: return "cancel";
    case QL_FINISH_NONE: break;
    }
    return "none";
}

/* ---- checks -------------------------------------------------------------------------------------------------- */

static ql_status check_real(const char *what, float v, double min, double max, ql_error *err) {
    if (!(v >= min && v <= max)) {
        return ql_fail(err, QL_ERR_USAGE, "%s is %g; accepted are %g to %g", what, (double)v, min, max);
    }
    return QL_OK;
}

static ql_status check_sampling(const ql_sampling *s, ql_error *err) {
    QL_TRY(check_real("temperature", s->temperature, 0, 100, err));
    if (!(s->top_p > 0 && s->top_p <= 1)) {
        return ql_fail(err, QL_ERR_USAGE, "top_p is %g; accepted are values above 0 up to 1", (double)s->top_p);
    }
    QL_TRY(check_real("min_p", s->min_p, 0, 1, err));
    QL_TRY(check_real("repetition_penalty", s->repetition_penalty, 1e-3, 1e3, err));
    QL_TRY(check_real("presence_penalty", s->presence_penalty, -2, 2, err));
    QL_TRY(check_real("frequency_penalty", s->frequency_penalty, -2, 2, err));
    if (s->top_k < 0) {
        return ql_fail(err, QL_ERR_USAGE, "top_k is %d; accepted are 0 (all) and up", s->top_k);
    }
    return QL_OK;
}

static bool penalised(const ql_sampling *s) {
    return s->repetition_penalty != 1 || s->presence_penalty != 0 || s->frequency_penalty != 0;
}

static ql_status take_prompt(ql_seq *seq, const ql_engine *e, const ql_request *r, ql_error *err) {
    if (r->text && r->ids) {
        return ql_fail(err, QL_ERR_USAGE, "a request has its prompt as text or as ids, not both");
    }
    if (r->text) {
        if (!e->tokenizer) {
            return ql_fail(err, QL_ERR_USAGE, "this checkpoint has no tokenizer.json: give the prompt as ids");
        }
        size_t n = r->text_bytes ? r->text_bytes : strlen(r->text);
        QL_TRY(ql_tokenizer_encode(e->tokenizer, r->text, n, &seq->prompt, &seq->n_prompt, err));
    } else {
        if (r->n_ids < 0) {
            return ql_fail(err, QL_ERR_USAGE, "n_ids is %d; a count cannot be negative", r->n_ids);
        }
        seq->n_prompt = r->ids ? r->n_ids : 0;
        QL_TRY(ql_alloc(NULL, (size_t)seq->n_prompt, sizeof(int32_t), "a prompt", (void **)&seq->prompt, err));
        if (seq->n_prompt > 0) {
            memcpy(seq->prompt, r->ids, (size_t)seq->n_prompt * sizeof(int32_t));
        }
    }
    if (seq->n_prompt == 0) {
        return ql_fail(err, QL_ERR_USAGE, "the prompt is empty; at least one token is needed");
    }
    for (int32_t i = 0; i < seq->n_prompt; i++) {
        if (seq->prompt[i] < 0 || seq->prompt[i] >= e->ckpt->config.vocab) {
            return ql_fail(err, QL_ERR_USAGE,
                           "token id %d at position %d is not in the vocabulary; accepted are 0 to %d", seq->prompt[i],
                           i, e->ckpt->config.vocab - 1);
        }
    }
    if (seq->n_prompt >= e->ctx) {
        return ql_fail(err, QL_ERR_USAGE,
                       "the prompt has %d tokens and the context %d: at most %d leave room for an answer",
                       seq->n_prompt, e->ctx, e->ctx - 1);
    }
    return QL_OK;
}

/* ---- create and free ----------------------------------------------------------------------------------------- */

static int32_t find_seen(const ql_seq *seq, int32_t id) {
    int32_t lo = 0, hi = seq->n_seen;
    while (lo < hi) {
        int32_t mid = (lo + hi) / 2;
        if (seq->seen[mid].id < id) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo;
}

/* Counts an id of the prompt (generated 0) or of the output (1). */
static void see(ql_seq *seq, int32_t id, int32_t generated) {
    int32_t at = find_seen(seq, id);
    if (at == seq->n_seen || seq->seen[at].id != id) {
        memmove(seq->seen + at + 1, seq->seen + at, (size_t)(seq->n_seen - at) * sizeof *seq->seen);
        seq->seen[at] = (ql_penalty){.id = id};
        seq->n_seen++;
    }
    seq->seen[at].count += generated;
}

static ql_status take_options(ql_seq *seq, const ql_engine *e, const ql_request *r, ql_error *err) {
    const ql_config *c = &e->ckpt->config;
    if (r->max_new < 0) {
        return ql_fail(err, QL_ERR_USAGE, "max_new is %d; accepted are 0 (until the end) and up", r->max_new);
    }
    int32_t room = e->ctx - seq->n_prompt;
    seq->max_new = r->max_new == 0 || r->max_new > room ? room : r->max_new;
    seq->sampling = r->sampling;
    if (r->model_sampling) {
        seq->sampling.temperature = c->do_sample ? c->temperature : 0;
        seq->sampling.top_k = c->top_k;
        seq->sampling.top_p = c->top_p;
    }
    QL_TRY(check_sampling(&seq->sampling, err));
    if (r->n_stop < 0 || r->n_stop > QL_MAX_STOP) {
        return ql_fail(err, QL_ERR_USAGE, "n_stop is %d; accepted are 0 to %d", r->n_stop, QL_MAX_STOP);
    }
    if (r->n_stop > 0 && !e->tokenizer) {
        return ql_fail(err, QL_ERR_USAGE, "stop strings need a tokenizer and this checkpoint has none");
    }
    if (r->step_rows < 0 || r->step_rows > e->limits.max_seq) {
        return ql_fail(err, QL_ERR_USAGE, "step_rows is %d; accepted are 0 to %d, the engine's max_seqs", r->step_rows,
                       e->limits.max_seq);
    }
    if (r->step_rows > 1 && penalised(&seq->sampling)) {
        return ql_fail(err, QL_ERR_USAGE,
                       "step_rows is %d in a request with penalties, which count no draft; accepted are 0 and 1",
                       r->step_rows);
    }
    seq->step_rows = r->step_rows > 0 ? r->step_rows : 1;
    seq->ignore_eos = r->ignore_eos != 0;
    seq->crc = r->crc != 0;
    seq->detach = r->detach != 0;
    seq->probe = r->probe;
    seq->probe_user = r->probe_user;
    return QL_OK;
}

ql_status ql_seq_create(ql_seq **out, const ql_engine *e, const ql_request *r, ql_error *err) {
    if (r->size != sizeof *r) {
        return ql_fail(err, QL_ERR_USAGE, "request.size is %zu; call ql_request_default (%zu)", r->size, sizeof *r);
    }
    ql_seq *seq = NULL;
    QL_TRY(ql_alloc(NULL, 1, sizeof *seq, "a request", (void **)&seq, err));
    seq->slot = -1;
    ql_buf_init(&seq->piece, NULL, SIZE_MAX / 4);
    ql_buf_init(&seq->out, NULL, SIZE_MAX / 4);
    ql_buf_init(&seq->text, NULL, SIZE_MAX / 4);
    ql_status status;
    QL_TRY_GOTO(take_prompt(seq, e, r, err), fail);
    QL_TRY_GOTO(take_options(seq, e, r, err), fail);
    size_t n = (size_t)seq->max_new, total = (size_t)seq->n_prompt + n;
    QL_TRY_GOTO(ql_alloc(NULL, n, sizeof *seq->ids, "generated ids", (void **)&seq->ids, err), fail);
    QL_TRY_GOTO(ql_alloc(NULL, n, sizeof *seq->logprobs, "log probabilities", (void **)&seq->logprobs, err), fail);
    QL_TRY_GOTO(ql_alloc(NULL, (size_t)ql_pages_of((int32_t)total), sizeof *seq->page, "a page table",
                         (void **)&seq->page, err),
                fail);
    if (penalised(&seq->sampling)) {
        QL_TRY_GOTO(ql_alloc(NULL, total, sizeof *seq->seen, "penalty counts", (void **)&seq->seen, err), fail);
        for (int32_t i = 0; i < seq->n_prompt; i++) {
            see(seq, seq->prompt[i], 0);
        }
    }
    if (e->tokenizer) {
        seq->has_text = true;
        ql_detok_init(&seq->detok, e->tokenizer, false);
        QL_TRY_GOTO(ql_stop_init(&seq->stop, NULL, r->stop, r->n_stop, err), fail);
    }
    *out = seq;
    return QL_OK;

fail:
    ql_seq_free(seq);
    return status;
}

void ql_seq_free(ql_seq *seq) {
    if (!seq) {
        return;
    }
    free(seq->prompt);
    free(seq->ids);
    free(seq->logprobs);
    free(seq->page);
    free(seq->seen);
    if (seq->has_text) {
        ql_stop_deinit(&seq->stop);
    }
    ql_buf_deinit(&seq->piece);
    ql_buf_deinit(&seq->out);
    ql_buf_deinit(&seq->text);
    free(seq);
}

/* ---- one id after another ------------------------------------------------------------------------------------- */

void ql_seq_sample_row(const ql_seq *seq, int32_t n_draft, int32_t k_full, ql_sample_row *row) {
    const ql_sampling *s = &seq->sampling;
    int32_t k = s->temperature == 0 ? 1 : s->top_k == 0 || s->top_k > k_full ? k_full : s->top_k;
    *row = (ql_sample_row){
        .temperature = s->temperature,
        .top_p = s->top_p,
        .min_p = s->min_p,
        .repetition = s->repetition_penalty,
        .presence = s->presence_penalty,
        .frequency = s->frequency_penalty,
        .top_k = s->top_k,
        .k = k,
        .seed = s->seed,
        .counter = (uint64_t)seq->n_ids + (uint64_t)n_draft,
    };
}

static bool is_eos(const ql_config *c, int32_t id) {
    for (int32_t i = 0; i < c->n_eos; i++) {
        if (c->eos[i] == id) {
            return true;
        }
    }
    return false;
}

ql_status ql_seq_accept(ql_seq *seq, const ql_engine *e, int32_t id, float logprob, ql_error *err) {
    seq->ids[seq->n_ids] = id;
    seq->logprobs[seq->n_ids] = logprob;
    seq->n_ids++;
    if (seq->seen) {
        see(seq, id, 1);
    }
    ql_buf_clear(&seq->out);
    if (!seq->ignore_eos && is_eos(&e->ckpt->config, id)) {
        seq->finish = QL_FINISH_EOS;
        return QL_OK;
    }
    if (seq->has_text) {
        ql_buf_clear(&seq->piece);
        QL_TRY(ql_detok_push(&seq->detok, id, &seq->piece, err));
        QL_TRY(ql_stop_push(&seq->stop, seq->piece.data, seq->piece.len, &seq->out, err));
        QL_TRY(ql_buf_add(&seq->text, seq->out.data, seq->out.len, err));
    }
    if (seq->has_text && seq->stop.hit) {
        seq->finish = QL_FINISH_STOP;
    } else if (seq->n_ids == seq->max_new) {
        seq->finish = QL_FINISH_LENGTH;
    }
    return QL_OK;
}

ql_status ql_seq_flush(ql_seq *seq, ql_error *err) {
    ql_buf_clear(&seq->out);
    if (!seq->has_text) {
        return QL_OK;
    }
    ql_buf_clear(&seq->piece);
    QL_TRY(ql_detok_flush(&seq->detok, &seq->piece, err));
    QL_TRY(ql_stop_push(&seq->stop, seq->piece.data, seq->piece.len, &seq->out, err));
    QL_TRY(ql_stop_flush(&seq->stop, &seq->out, err));
    return ql_buf_add(&seq->text, seq->out.data, seq->out.len, err);
}

/* ---- result --------------------------------------------------------------------------------------------------- */

ql_status ql_seq_result(ql_seq *seq, ql_result **result, ql_error *err) {
    ql_result *r = NULL;
    QL_TRY(ql_alloc(NULL, 1, sizeof *r, "a result", (void **)&r, err));
    r->request = seq->id;
    r->status = seq->error.status;
    r->error = seq->error;
    r->finish = seq->finish;
    r->n_prompt = seq->n_prompt;
    r->n_ids = seq->n_ids;
    r->prompt_ids = seq->prompt;
    r->ids = seq->ids;
    r->logprobs = seq->logprobs;
    if (seq->has_text) {
        size_t len = 0;
        r->text = ql_buf_take(&seq->text, &len);
        r->text_bytes = len;
    }
    r->has_crc = seq->crc;
    r->logits_crc32 = seq->logits_crc32;
    r->prompt_s = seq->prompt_s;
    if (seq->n_ids > 0) {
        r->first_token_s = (double)(seq->first_ns - seq->submit_ns) * 1e-9;
        r->decode_s = (double)(seq->last_ns - seq->first_ns) * 1e-9;
    }
    seq->prompt = NULL;
    seq->ids = NULL;
    seq->logprobs = NULL;
    *result = r;
    return QL_OK;
}

void ql_result_free(ql_result *r) {
    if (r) {
        free((void *)(uintptr_t)r->prompt_ids);
        free((void *)(uintptr_t)r->ids);
        free((void *)(uintptr_t)r->logprobs);
        free((void *)(uintptr_t)r->text);
        free(r);
    }
}
