/* The conductor: admits requests, commands steps, hands out what they produced. */
#include "runtime/engine/engine_impl.h"

#include <stdlib.h>
#include <string.h>
#include <zlib.h>

/* ---- events -------------------------------------------------------------------------------------------------- */

static void send(ql_seq *seq, ql_event *event) {
    if (seq->callback) {
        event->request = seq->id;
        event->text = event->text ? event->text : "";
        seq->callback(seq->user, event);
    }
}

static void publish_counts(ql_engine *e) {
    __atomic_store_n(&e->live, e->n_active, __ATOMIC_RELAXED);
    __atomic_store_n(&e->free_slots, e->n_free_slot, __ATOMIC_RELAXED);
    __atomic_store_n(&e->free_pages, e->n_free_page, __ATOMIC_RELAXED);
}

/* Gives back what a sequence holds of the lanes' memory. Slots and pages need no clearing: position 0 starts afresh. */
static void release(ql_engine *e, ql_seq *seq) {
    if (seq->slot >= 0) {
        e->free_slot[e->n_free_slot++] = seq->slot;
        seq->slot = -1;
    }
    for (int32_t i = seq->n_page; i-- > 0;) {
        e->free_page[e->n_free_page++] = seq->page[i];
    }
    seq->n_page = 0;
}

/* Last event, then the result may be collected. The sequence is in no run list any more and may be gone on return. */
static void end(ql_engine *e, ql_seq *seq, const ql_error *error) {
    release(e, seq);
    publish_counts(e);
    seq->state = QL_SEQ_ENDED;
    if (error) {
        seq->error = *error;
        seq->finish = QL_FINISH_NONE;
    }
    ql_event event = {.kind = QL_EVENT_END, .finish = seq->finish};
    if (seq->has_text && ql_seq_flush(seq, seq->error.status ? NULL : &seq->error) == QL_OK) {
        event.text = seq->out.data;
        event.text_bytes = seq->out.len;
    }
    event.error = seq->error.status ? &seq->error : NULL;
    send(seq, &event);
    ql_lock(&e->mutex);
    bool detach = seq->detach;
    if (detach) {
        ql_seq **at = &e->all;
        while (*at != seq) {
            at = &(*at)->next;
        }
        *at = seq->next;
    } else {
        seq->ended = true;
        ql_cond_broadcast(&e->done);
    }
    ql_unlock(&e->mutex);
    if (detach) {
        ql_seq_free(seq);
    }
}

/* ---- admission ----------------------------------------------------------------------------------------------- */

static void append(ql_seq ***end_of_list, ql_seq *seq) {
    seq->next_run = NULL;
    **end_of_list = seq;
    *end_of_list = &seq->next_run;
}

static void unlink_active(ql_engine *e, ql_seq *seq) {
    ql_seq **at = &e->active;
    while (*at != seq) {
        at = &(*at)->next_run;
    }
    *at = seq->next_run;
    e->n_active--;
}

/* First come, first served: a request that must wait for pages is not overtaken. A sequence takes all pages it may ever
 * need, so that none stops half-way for want of memory. */
static void admit(ql_engine *e) {
    ql_seq **tail = &e->active;
    while (*tail) {
        tail = &(*tail)->next_run;
    }
    while (e->queue && e->n_free_slot > 0) {
        ql_seq *seq = e->queue;
        int32_t need = ql_pages_of(seq->n_prompt + seq->max_new);
        if (need > e->n_free_page) {
            break;
        }
        e->queue = seq->next_run;
        if (!e->queue) {
            e->queue_end = &e->queue;
        }
        seq->slot = e->free_slot[--e->n_free_slot];
        for (int32_t i = 0; i < need; i++) {
            seq->page[i] = e->free_page[--e->n_free_page];
        }
        seq->n_page = need;
        seq->state = QL_SEQ_PROMPT;
        e->n_active++;
        append(&tail, seq);
    }
    publish_counts(e);
}

static bool cancelled(const ql_seq *seq) { return __atomic_load_n(&seq->cancel, __ATOMIC_RELAXED) != 0; }

static void end_cancelled(ql_engine *e) {
    for (ql_seq *seq = e->active, *next; seq; seq = next) {
        next = seq->next_run;
        if (cancelled(seq)) {
            unlink_active(e, seq);
            seq->finish = QL_FINISH_CANCEL;
            end(e, seq, NULL);
        }
    }
    ql_seq *keep = NULL, **keep_end = &keep;
    for (ql_seq *seq = e->queue, *next; seq; seq = next) {
        next = seq->next_run;
        if (cancelled(seq)) {
            seq->finish = QL_FINISH_CANCEL;
            end(e, seq, NULL);
        } else {
            append(&keep_end, seq);
        }
    }
    e->queue = keep;
    e->queue_end = keep ? keep_end : &e->queue;
}

/* Ends every sequence, active or waiting: with an error, or as cancelled where error is NULL. */
static void end_all(ql_engine *e, const ql_error *error) {
    while (e->active) {
        ql_seq *seq = e->active;
        unlink_active(e, seq);
        seq->finish = QL_FINISH_CANCEL;
        end(e, seq, error);
    }
    while (e->queue) {
        ql_seq *seq = e->queue;
        e->queue = seq->next_run;
        seq->finish = QL_FINISH_CANCEL;
        end(e, seq, error);
    }
    e->queue_end = &e->queue;
}

/* ---- probes -------------------------------------------------------------------------------------------------- */

/* Host memory for the intermediate rows of a probed prompt step. */
static ql_status alloc_probe(ql_engine *e, ql_error *err) {
    const ql_config *c = &e->ckpt->config;
    ql_step *s = &e->step;
    size_t rows = (size_t)s->n_row, hidden = rows * (size_t)c->hidden, vocab = (size_t)c->vocab;
    const char *what = "a probe's rows";
    QL_TRY(ql_alloc(NULL, ((size_t)c->n_layer + 1) * hidden, sizeof(float), what, (void **)&s->probe_hidden, err));
    QL_TRY(ql_alloc(NULL, hidden, sizeof(float), what, (void **)&s->probe_final, err));
    QL_TRY(ql_alloc(NULL, rows * vocab, sizeof(float), what, (void **)&s->probe_logits, err));
    return ql_alloc(NULL, (size_t)s->n_mtp_row * vocab, sizeof(float), what, (void **)&s->probe_mtp, err);
}

static void free_probe(ql_step *s) {
    free(s->probe_hidden);
    free(s->probe_final);
    free(s->probe_logits);
    free(s->probe_mtp);
    s->probe_hidden = s->probe_final = s->probe_logits = s->probe_mtp = NULL;
}

static void send_probe(ql_engine *e, const ql_seq *seq) {
    const ql_config *c = &e->ckpt->config;
    const ql_step *s = &e->step;
    int32_t row0 = seq->n_done;
    for (int32_t i = 0; i <= c->n_layer; i++) {
        const float *rows = s->probe_hidden + (int64_t)i * s->n_row * c->hidden;
        seq->probe(seq->probe_user, QL_PROBE_HIDDEN, i, row0, s->n_row, c->hidden, rows);
    }
    seq->probe(seq->probe_user, QL_PROBE_FINAL_HIDDEN, 0, row0, s->n_row, c->hidden, s->probe_final);
    seq->probe(seq->probe_user, QL_PROBE_LOGITS, 0, row0, s->n_row, c->vocab, s->probe_logits);
    if (s->n_mtp_row > 0) {
        seq->probe(seq->probe_user, QL_PROBE_MTP_LOGITS, 0, row0, s->n_mtp_row, c->vocab, s->probe_mtp);
    }
}

/* ---- steps --------------------------------------------------------------------------------------------------- */

/* One chosen id goes into its sequence, or in its place that of a draft, and the sequence may end with it. */
static void take_output(ql_engine *e, int32_t out) {
    ql_seq *seq = e->out_seq[out];
    int32_t vocab = e->ckpt->config.vocab, id = e->out_id[out];
    const float *logits = e->step.logits ? e->step.logits + (int64_t)out * vocab : NULL;
    int64_t now = ql_now_ns();
    if (seq->n_ids == 0) {
        seq->first_ns = now;
        seq->prompt_s = (double)(now - seq->start_ns) * 1e-9;
    }
    seq->last_ns = now;
    if (seq->crc) {
        seq->logits_crc32 = (uint32_t)crc32_z(seq->logits_crc32, (const Bytef *)logits, (size_t)vocab * sizeof(float));
    }
    if (seq->probe && e->step.phase == QL_PHASE_GEN) {
        seq->probe(seq->probe_user, QL_PROBE_LOGITS, 0, seq->n_prompt + seq->n_ids - 1, 1, vocab, logits);
    }
    if (out + 1 < e->step.n_out && e->out_seq[out + 1] == seq) { /* the next row has taken the draft's */
        id = seq->ids[seq->n_ids];
    } else if (seq->n_ids < e->hooks.n_force) {
        id = e->hooks.force_ids[seq->n_ids];
    }
    seq->state = QL_SEQ_GEN;
    ql_error err = {QL_OK, ""};
    ql_status status = ql_seq_accept(seq, e, id, e->out_logprob[out], &err);
    ql_dev_count(&e->n_generated, 1);
    if (status == QL_OK) {
        send(seq, &(ql_event){.kind = QL_EVENT_TOKEN,
                              .id = id,
                              .logprob = e->out_logprob[out],
                              .text = seq->out.data,
                              .text_bytes = seq->out.len});
    }
    bool over = status != QL_OK || seq->finish != QL_FINISH_NONE;
    for (int32_t i = out + 1; i < e->step.n_out && e->out_seq[i] == seq && (over || cancelled(seq)); i++) {
        e->out_seq[i] = NULL; /* a draft goes on behind the end */
    }
    if (over) {
        unlink_active(e, seq);
        end(e, seq, status == QL_OK ? NULL : &err);
    }
}

static void take_outputs(ql_engine *e) {
    for (int32_t i = 0; i < e->step.n_out; i++) {
        if (e->out_seq[i]) {
            take_output(e, i);
        }
    }
}

static ql_status prompt_step(ql_engine *e, ql_error *err) {
    const ql_step *s = &e->step;
    ql_seq *probed = e->seg_seq[0]->probe ? e->seg_seq[0] : NULL;
    if (probed) {
        ql_error memory = {QL_OK, ""};
        if (alloc_probe(e, &memory) != QL_OK) { /* this request's failure alone */
            free_probe(&e->step);
            unlink_active(e, probed);
            end(e, probed, &memory);
            return QL_OK;
        }
    }
    int64_t now = ql_now_ns();
    for (int32_t i = 0; i < s->n_seg; i++) {
        e->seg_seq[i]->start_ns = e->seg_seq[i]->n_done == 0 ? now : e->seg_seq[i]->start_ns;
    }
    ql_status status = ql_engine_run_step(e, err);
    if (status == QL_OK) {
        if (probed) {
            send_probe(e, probed);
        }
        const int32_t *seg_row = (const int32_t *)(e->block + e->layout.seg_row);
        for (int32_t i = 0; i < s->n_seg; i++) {
            ql_seq *seq = e->seg_seq[i];
            seq->n_done += seg_row[i + 1] - seg_row[i];
            send(seq, &(ql_event){.kind = QL_EVENT_PROMPT, .done = seq->n_done, .total = seq->n_prompt});
        }
        ql_dev_count(&e->n_prompt_tokens, (uint64_t)s->n_row);
        take_outputs(e);
    }
    if (!ql_abort_raised(&e->lanes.abort)) {
        free_probe(&e->step); /* after an abort a late lane may still write there; close frees it */
    }
    return status;
}

static ql_status gen_step(ql_engine *e, ql_error *err) {
    QL_TRY(ql_engine_run_step(e, err));
    take_outputs(e);
    return QL_OK;
}

void *ql_conductor_main(void *arg) {
    ql_engine *e = arg;
    for (;;) {
        ql_lock(&e->mutex);
        while (!e->closing && !e->incoming && !e->queue && !e->active) {
            ql_cond_wait(&e->work, &e->mutex);
        }
        if (e->incoming) {
            *e->queue_end = e->incoming;
            e->queue_end = e->incoming_end;
            e->incoming = NULL;
            e->incoming_end = &e->incoming;
        }
        bool closing = e->closing;
        ql_error failed = e->failed;
        ql_unlock(&e->mutex);
        if (closing) {
            end_all(e, NULL);
            return NULL;
        }
        if (failed.status != QL_OK) {
            end_all(e, &failed);
            continue;
        }
        end_cancelled(e);
        admit(e);
        ql_status status = QL_OK;
        if (ql_step_build_prompt(e)) {
            status = prompt_step(e, &failed);
        }
        if (status == QL_OK) {
            end_cancelled(e);
            if (ql_step_build_gen(e)) {
                status = gen_step(e, &failed);
            }
        }
        if (status != QL_OK) {
            ql_logf(&e->log, QL_LOG_ERROR, "%s", failed.text);
            ql_lock(&e->mutex);
            e->failed = failed;
            ql_unlock(&e->mutex);
            end_all(e, &failed);
        }
    }
}
