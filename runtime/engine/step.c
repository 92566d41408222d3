/* Builds steps: which rows of which sequences run next, laid out as one block that lanes upload.
 *
 * A step is of one phase. A prompt step takes up to a chunk of rows from the prompts under way, whole 64-token blocks
 * except at a prompt's end, so that the chunked forms see the same blocks however prompts are grouped. A generation step
 * takes one row of every sequence that generates, or several of one that asks for steps like those that check a draft.
 */
#include "runtime/engine/engine_impl.h"

#include <string.h>

typedef struct block_view {
    int32_t *id, *row_seg, *row_pos, *seg_row, *seg_pos, *seg_slot, *page, *out_row, *next_id, *mtp_seg_row;
    ql_sample_row *sample;
    ql_penalty *penalty;
} block_view;

static block_view view_of(ql_engine *e) {
    const ql_step_layout *l = &e->layout;
    uint8_t *b = e->block;
    return (block_view){
        .id = (int32_t *)(b + l->id),
        .row_seg = (int32_t *)(b + l->row_seg),
        .row_pos = (int32_t *)(b + l->row_pos),
        .seg_row = (int32_t *)(b + l->seg_row),
        .seg_pos = (int32_t *)(b + l->seg_pos),
        .seg_slot = (int32_t *)(b + l->seg_slot),
        .page = (int32_t *)(b + l->page),
        .out_row = (int32_t *)(b + l->out_row),
        .next_id = (int32_t *)(b + l->next_id),
        .mtp_seg_row = (int32_t *)(b + l->mtp_seg_row),
        .sample = (ql_sample_row *)(b + l->sample),
        .penalty = (ql_penalty *)(b + l->penalty),
    };
}

static void begin(ql_engine *e, ql_phase phase) {
    memset(&e->step, 0, sizeof e->step);
    e->step.phase = phase;
    e->step.block = e->block;
    e->step.id = e->out_id;
    e->step.logprob = e->out_logprob;
    e->step.k_cap = 1;
}

/* Adds n rows of a sequence from position pos. */
static void add_segment(ql_engine *e, block_view *v, ql_seq *seq, const int32_t *ids, int32_t pos, int32_t n) {
    ql_step *s = &e->step;
    int32_t max_page = ql_model_max_page(&e->limits);
    e->seg_seq[s->n_seg] = seq;
    v->seg_row[s->n_seg] = s->n_row;
    v->seg_pos[s->n_seg] = pos;
    v->seg_slot[s->n_seg] = seq->slot;
    memcpy(v->page + (int64_t)s->n_seg * max_page, seq->page, (size_t)seq->n_page * sizeof *seq->page);
    for (int32_t i = 0; i < n; i++) {
        v->id[s->n_row + i] = ids[i];
        v->row_seg[s->n_row + i] = s->n_seg;
        v->row_pos[s->n_row + i] = pos + i;
    }
    s->n_row += n;
    s->n_seg++;
    v->seg_row[s->n_seg] = s->n_row;
}

/* Asks for logits and an id of a row, which has n_draft ids of a draft before it and with it. */
static void add_output(ql_engine *e, block_view *v, ql_seq *seq, int32_t of_row, int32_t n_draft) {
    ql_step *s = &e->step;
    ql_sample_row *row = &v->sample[s->n_out];
    ql_seq_sample_row(seq, n_draft, ql_model_k_full(&e->ckpt->config, e->n_lane), row);
    row->penalty0 = s->n_penalty;
    row->n_penalty = seq->n_seen;
    if (seq->n_seen > 0) {
        memcpy(v->penalty + s->n_penalty, seq->seen, (size_t)seq->n_seen * sizeof *seq->seen);
        s->n_penalty += seq->n_seen;
    }
    v->out_row[s->n_out] = of_row;
    e->out_seq[s->n_out] = seq;
    s->k_cap = row->k > s->k_cap ? row->k : s->k_cap;
    s->n_out++;
    if (seq->crc || seq->probe) {
        s->logits = e->logits;
    }
}

bool ql_step_build_prompt(ql_engine *e) {
    block_view v = view_of(e);
    begin(e, QL_PHASE_PROMPT);
    ql_step *s = &e->step;
    for (ql_seq *seq = e->active; seq; seq = seq->next_run) {
        if (seq->state != QL_SEQ_PROMPT) {
            continue;
        }
        if (seq->probe && s->n_seg > 0) {
            break; /* a probed prompt runs alone, in its turn */
        }
        int32_t room = e->options.chunk - s->n_row, left = seq->n_prompt - seq->n_done;
        int32_t n = left <= room ? left : room / QL_PAGE * QL_PAGE;
        if (n == 0) {
            break;
        }
        add_segment(e, &v, seq, seq->prompt + seq->n_done, seq->n_done, n);
        if (seq->n_done + n == seq->n_prompt) {
            add_output(e, &v, seq, s->n_row - 1, 0);
        }
        if (seq->probe) {
            if (e->limits.mtp) {
                s->n_mtp_row = seq->n_done + n < seq->n_prompt ? n : n - 1;
                memcpy(v.next_id, seq->prompt + seq->n_done + 1, (size_t)s->n_mtp_row * sizeof *v.next_id);
                v.mtp_seg_row[0] = 0;
                v.mtp_seg_row[1] = s->n_mtp_row;
            }
            break;
        }
    }
    return s->n_row > 0;
}

/* Writes the next n ids of a sequence, which are its draft, behind those that it has. */
static void write_draft(const ql_engine *e, ql_seq *seq, int32_t n) {
    for (int32_t i = seq->n_ids; i < seq->n_ids + n; i++) {
        seq->ids[i] = i < e->hooks.n_force ? e->hooks.force_ids[i] : seq->ids[i - 1];
    }
}

bool ql_step_build_gen(ql_engine *e) {
    block_view v = view_of(e);
    begin(e, QL_PHASE_GEN);
    int32_t spare = e->limits.max_seq - e->n_active; /* outputs beyond one of each sequence */
    for (ql_seq *seq = e->active; seq; seq = seq->next_run) {
        if (seq->state == QL_SEQ_GEN) {
            int32_t left = seq->max_new - seq->n_ids, draft = seq->step_rows - 1, row0 = e->step.n_row;
            draft = draft < left ? draft : left - 1;
            draft = draft < spare ? draft : spare;
            spare -= draft;
            write_draft(e, seq, draft);
            add_segment(e, &v, seq, &seq->ids[seq->n_ids - 1], seq->n_prompt + seq->n_ids - 1, 1 + draft);
            for (int32_t i = 0; i <= draft; i++) {
                add_output(e, &v, seq, row0 + i, i);
            }
        }
    }
    return e->step.n_row > 0;
}
