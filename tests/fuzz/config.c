/* config.json, and after a line that is "--" a generation_config.json. What is accepted must be a model that can be cut
 * into its lanes; what is refused must say why and leave the config alone. */
#include "loader/role.h"
#include "loader/shard.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(bool ok) {
    if (!ok) {
        abort();
    }
}

static void check_refusal(ql_status status, const ql_error *err) {
    check(err->status == status && err->text[0] && !strchr(err->text, '\n'));
}

/* Rows or columns of a part, summed over lanes, are those of the whole, or more where heads are shared. */
static void check_cuts(const ql_config *c) {
    for (int32_t n = 1; n <= c->slices; n *= 2) {
        for (int role = 0; role < QL_ROLE_COUNT; role++) {
            const ql_part part = ql_role_get((ql_role)role)->part;
            int64_t shape[3], sum = 0;
            check(ql_role_shape(c, (ql_role)role, shape) >= 1);
            int32_t axis = -1;
            for (int32_t lane = 0; lane < n; lane++) {
                ql_shard s;
                check(ql_shard_init(&s, c, n, lane, NULL) == QL_OK);
                const ql_cut cut = ql_shard_cut(c, &s, part);
                axis = cut.axis;
                for (int32_t r = 0; r < cut.n_range; r++) {
                    check(cut.begin[r] >= 0 && cut.begin[r] < cut.end[r] && cut.end[r] <= shape[axis]);
                }
                sum += ql_cut_len(&cut);
            }
            if (part == QL_PART_KV || part == QL_PART_IN_QKV) {
                check(sum >= shape[axis]);
            } else {
                check(axis < 0 || sum == shape[axis]);
            }
        }
        check(ql_shard_init(&(ql_shard){0}, c, 3 * n, 0, NULL) == QL_ERR_USAGE);
    }
}

static void check_config(const ql_config *c) {
    check(c->n_layer >= 1 && c->n_layer <= QL_MAX_LAYERS);
    check(c->hidden > 0 && c->vocab >= QL_VOCAB_SLICES && c->max_ctx > 0);
    check(c->rotary_dim >= 2 && c->rotary_dim <= QL_HEAD_DIM && c->rotary_dim % 2 == 0);
    check(c->rope_theta > 1 && c->yarn_factor >= 1 && c->rms_eps >= 0);
    check(c->slices == 1 || c->slices == 2 || c->slices == 4 || c->slices == 8);
    check(c->n_eos >= 0 && c->n_eos <= QL_MAX_EOS);
    for (int32_t i = 0; i < c->n_eos; i++) {
        check(c->eos[i] >= 0 && c->eos[i] < c->vocab);
    }
    check_cuts(c);
}

static json_t *parse(const char *text, size_t len) {
    json_t *root = NULL;
    ql_error err = {0};
    const ql_status status = ql_json_parse(text, len, "fuzz", &root, &err);
    if (status != QL_OK) {
        check_refusal(status, &err);
    }
    return root;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const char *text = (const char *)data;
    const char *second = size > 4 ? memmem(data, size, "\n--\n", 4) : NULL;
    const size_t first_len = second ? (size_t)(second - text) : size;
    json_t *root = parse(text, first_len);
    if (!root) {
        return 0;
    }
    ql_config c, untouched;
    memset(&c, 0x5a, sizeof c);
    memset(&untouched, 0x5a, sizeof untouched);
    ql_error err = {0};
    ql_status status = ql_config_parse(root, "fuzz", &c, &err);
    if (status == QL_OK) {
        check_config(&c);
        json_t *generation = second ? parse(second + 4, size - first_len - 4) : NULL;
        if (generation) {
            status = ql_config_parse_generation(generation, "fuzz", &c, &err);
            if (status == QL_OK) {
                check_config(&c);
                check(c.temperature >= 0 && c.top_p > 0 && c.top_p <= 1 && c.top_k >= 0);
            } else {
                check_refusal(status, &err);
            }
            json_decref(generation);
        }
    } else {
        check_refusal(status, &err);
        check(memcmp(&c, &untouched, sizeof c) == 0);
    }
    json_decref(root);
    return 0;
}
